# Starts, stops or restarts a server's unit, if what runs is still what was seen.
# Arguments: start | stop | restart | enable | adopt, the place, the server's name, its main process as it was seen
# (PID:START, or - for none), the digest of what it is to be started with, the port it will listen on, and for adopt the
# service that was made by hand and that is stopped and disabled.
main() {
	action=$1 place=$2 name=$3 seen=$4 digest=$5 port=$6 other=$7
	enter_place "$place"
	wait_for_systemd
	unit=reconcile-$name.service
	if [ "$action" = adopt ]; then
		inside 660 "systemctl disable -q '$other' 2>/dev/null; systemctl stop '$other'" </dev/null ||
			die "systemd cannot stop $other in $(place_name)"
		return
	fi
	if [ "$seen" != - ]; then
		[ "$(started_at "${seen%:*}")" = "${seen#*:}" ] || stale "the process of $name has ended or was started anew since"
	elif is_up; then
		stale "$name runs already"
	fi
	if [ "$action" != stop ]; then
		marked=$(inside 30 "cat '/opt/reconcile/server/$name/marker.json'" </dev/null) || stale "$name has no marker any more"
		case $marked in *"\"$digest\""*) ;; *) stale "the unit of $name has been written again" ;; esac
	fi
	if [ "$action" = enable ]; then
		inside 30 "systemctl enable -q '$unit'" </dev/null || die "systemd cannot enable $unit in $(place_name)"
		return
	fi
	if [ "$action" != start ]; then stop_it; fi
	if [ "$action" = stop ]; then return; fi
	if is_taken; then stale "somebody else listens on port $port by now"; fi
	# It starts in its own time: that it is there, with what it was told, is all that is waited for here.
	text="rm -f '/run/reconcile-server/$name.ends'; systemctl reset-failed '$unit' 2>/dev/null; systemctl enable -q '$unit' && systemctl start '$unit'"
	inside 60 "$text" </dev/null || die "systemd cannot start $unit in $(place_name): $(why)"
}

# Everything of the unit has to be gone: what is left of an engine holds the GPUs' memory. No other process is touched.
stop_it() {
	inside 660 "systemctl stop '$unit'" </dev/null || die "systemd cannot stop $unit in $(place_name)"
	if is_up; then
		inside 30 "systemctl kill --kill-who=all -s KILL '$unit'" </dev/null || :
		left=300
		while is_up; do
			left=$((left - 1))
			[ "$left" -gt 0 ] || die "processes of $unit do not end, not even killed"
			sleep 0.1
		done
	fi
	if [ "$action" = stop ]; then
		inside 60 "systemctl disable -q '$unit'; systemctl reset-failed '$unit' 2>/dev/null || :" </dev/null || die "systemd cannot disable $unit"
	fi
}

# why: what systemd says of the unit.
why() {
	inside 30 "systemctl status -n 5 --no-pager '$unit'" </dev/null | tail -n 6 | tr '\n' ' '
}

# is_up: whether the unit has processes, seen as the look sees them.
is_up() {
	group=$(group_of)/reconcile-$name.service
	[ -r "$group/cgroup.events" ] && grep -qx 'populated 1' "$group/cgroup.events"
}

group_of() {
	if [ "$place" = - ]; then
		printf '/sys/fs/cgroup/system.slice'
		return
	fi
	init=$(lxc-info -n "$place" -p -H 2>/dev/null </dev/null)
	group=$(sed -n 's/^0:://p' "/proc/$init/cgroup") || stale "CT $place does not run any more"
	group=${group%/init.scope}
	printf '/sys/fs/cgroup%s/system.slice' "${group%/}"
}

# started_at PID: when a process was started, in clock ticks since boot; nothing when there is none.
started_at() {
	[ -r "/proc/$1/stat" ] && read -r stat <"/proc/$1/stat" || return 0
	# shellcheck disable=SC2086 # its fields after its name
	set -- ${stat##*) }
	printf '%s' "${20}"
}

# is_taken: whether somebody in the place listens on the port.
is_taken() {
	inside 30 "cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | while read -r _ local _ state _; do
		if [ \"\$state\" = 0A ] && [ \"\$((0x\${local##*:}))\" = $port ]; then exit 3; fi
	done
	[ \$? = 3 ]" </dev/null
}

main "$@"
