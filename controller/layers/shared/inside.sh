# What scripts about one place have at hand: a container of this host, or the host itself. Stands before them.
# `enter_place PLACE` has to come first: a container's id, or - for the host itself. After it, `inside` runs text in the
# place as its root, with the place's own programs and files; the same text works in both.

# enter_place PLACE: sets `place`; stale when the container does not run here (any more).
enter_place() {
	place=$1
	[ "$place" = - ] || lxc-info -n "$place" -s -H 2>/dev/null </dev/null | grep -qx RUNNING || stale "CT $place does not run"
}

# inside SECONDS TEXT: runs a shell's text in the place; its standard input is ours, its exit code its own (124: out of
# time). What it started and left running in a container is not ended with this script: that is for `inside_job`.
inside() {
	_inside_text="LC_ALL=C HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LC_ALL HOME PATH
cd /
$2"
	# The limit outside is for a container that does not even let anything in.
	if [ "$place" = - ]; then
		timeout "$1" sh -c "$_inside_text" 8>&-
	else
		timeout -k 10 "$(($1 + 20))" pct exec "$place" -- timeout "$1" sh -c "$_inside_text" 8>&-
	fi
}

# put FILE MODE PATH: copies a file of this host into the place, beside and in one rename, on disk.
# FILE - is our standard input. The place itself resolves PATH: a link in a container leads nowhere outside it.
put() {
	if [ "$1" != - ]; then
		put - "$2" "$3" <"$1"
		return
	fi
	inside 600 "umask 077
path='$3'
mkdir -p \"\${path%/*}\" && rm -rf \"\$path.reconcile-new\" && cat >\"\$path.reconcile-new\" &&
	chmod '$2' \"\$path.reconcile-new\" && sync \"\$path.reconcile-new\" && mv -fT \"\$path.reconcile-new\" \"\$path\"" ||
		die "cannot write $3 in $(place_name)"
}

# inside_job SECONDS TEXT: like `inside`, for long work without standard input, which ends with this script however that
# ends: what runs in a container is not in this unit's cgroup, so it hangs on a pipe that only this script holds open.
inside_job() {
	_pipe=$RECONCILE_STEP_DIR/alive
	rm -f "$_pipe"
	mkfifo "$_pipe"
	# What a shell puts into the background reads nothing, unless it is told what to read.
	inside "$1" "setsid sh -c '$(_quoted "$2")' </dev/null & work=\$!
exec 3<&0
{ cat >/dev/null; kill -TERM -\$work; sleep 5; kill -KILL -\$work; } <&3 >/dev/null 2>&1 &
watch=\$!
wait \$work; rc=\$?
kill \$watch 2>/dev/null
exit \$rc" <"$_pipe" &
	_inside_pid=$!
	exec 8>"$_pipe"
	rm -f "$_pipe"
	_inside_rc=0
	wait "$_inside_pid" || _inside_rc=$?
	exec 8>&-
	return "$_inside_rc"
}

# wait_for_systemd: until the place's systemd answers; one of a container that has just been started takes a moment.
wait_for_systemd() {
	inside 60 "until systemctl show -p Version >/dev/null 2>&1; do sleep 0.2; done" </dev/null ||
		stale "systemd does not answer in $(place_name)"
}

# place_name: the place, for people.
place_name() {
	if [ "$place" = - ]; then printf 'this host'; else printf 'CT %s' "$place"; fi
}

# _quoted TEXT: with each ' written so that it can stand between two '.
_quoted() {
	printf '%s.' "$1" | sed "s/'/'\\\\''/g" | { _all=$(cat); printf '%s' "${_all%.}"; }
}
