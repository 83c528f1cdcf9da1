# How a unit of ours begins and ends. Laid down in front of the action script, which goes on where this stops:
# systemd starts this file with "run", and once more with "end" when everything of the unit is gone, however that came
# about (ExecStopPost). The RECONCILE_* variables are set above.

# begin: output into files, standard input from one that is gone as soon as it is open: it may hold secrets.
# A start that systemd carried out only after a later step was laid down begins nothing.
_begin() {
	umask 022
	read -r _ _last </var/lib/reconcile/generation
	case $RECONCILE_UNIT:$_last in
	reconcile-step:"$RECONCILE_GENERATION") ;;
	reconcile-step:*) exit 75 ;;
	esac
	read -r _now _ </proc/uptime
	printf '%s\n' "$_now" >"$RECONCILE_STEP_DIR/began"
	case $RECONCILE_UNIT in
	reconcile-step) exec >"$RECONCILE_STEP_DIR/out" 2>"$RECONCILE_STEP_DIR/err" ;;
	*) exec >"$RECONCILE_STEP_DIR/out" 2>&1 ;;
	esac
	exec <"/run/reconcile/stdin.$RECONCILE_UNIT"
	rm -f "/run/reconcile/stdin.$RECONCILE_UNIT"
}

# end: what systemd says about how it ended, into `rc`; then whoever waits is told.
_end() {
	umask 077
	rm -f "/run/reconcile/stdin.$RECONCILE_UNIT"
	_how=killed
	case ${EXIT_CODE-}:${EXIT_STATUS-}:${SERVICE_RESULT-} in
	exited:*) _how=exit _rc=$EXIT_STATUS ;;
	*:timeout) _how=timeout _rc=124 ;;
	*:KILL:*) _rc=137 ;;
	*:TERM:*) _rc=143 ;;
	*) _rc=128 ;;
	esac
	read -r _now _ </proc/uptime
	printf '%s %s %s\n' "$_rc" "$_how" "$_now" >"$RECONCILE_STEP_DIR/rc.new" &&
		sync "$RECONCILE_STEP_DIR/rc.new" &&
		mv -f "$RECONCILE_STEP_DIR/rc.new" "$RECONCILE_STEP_DIR/rc"
	if [ "$RECONCILE_UNIT" = reconcile-step ]; then _renew; fi
	printf '%s %s\n' "$_rc" "$_how" 1<>"$RECONCILE_STEP_DIR/ended"
}

# renew: the lease runs from the end of a step, however long it took, unless another has taken it by then.
_renew() {
	exec 9>>/run/reconcile/lock
	flock -w 1 9 || return
	[ -s /run/reconcile/lease ] || return
	{
		read -r _holder _
		read -r _holder_name
	} </run/reconcile/lease
	[ "$_holder" = "$RECONCILE_LEASE" ] || return
	printf '%s %d\n%s\n' "$_holder" "$((${_now%.*} + RECONCILE_LEASE_SECONDS))" "$_holder_name" >/run/reconcile/lease.new
	mv -f /run/reconcile/lease.new /run/reconcile/lease
}

case $1 in
run) _begin ;;
end)
	_end
	exit
	;;
*) exit 64 ;;
esac
