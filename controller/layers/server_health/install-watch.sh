# Installs the watch of a server beside it, and starts it. The server goes on as it is.
# Arguments: the place, the server's name, the Python that runs the watch, and the sizes of what follows on standard
# input: the program, its settings, its unit, its marker. The marker comes last: without it the watch counts as missing.
main() {
	place=$1 name=$2 python=$3 program=$4 settings=$5 unit=$6 marker=$7
	enter_place "$place"
	here=/opt/reconcile/server/$name watch=reconcile-$name-watch.service
	inside 30 "[ -x '$python' ] && [ -f '$here/marker.json' ]" </dev/null || stale "$name has no unit or no environment any more"
	inside 30 "rm -f '$here/watch.marker' '$here/health.beat'" </dev/null || die "cannot write in $here"
	head -c "$program" | put - 0644 "$here/checks.pyz"
	head -c "$settings" | put - 0644 "$here/checks.json"
	head -c "$unit" | put - 0644 "/etc/systemd/system/$watch"
	inside 120 "systemctl daemon-reload && systemctl enable -q '$watch' && systemctl restart '$watch'" </dev/null ||
		die "systemd cannot start $watch in $(place_name)"
	inside 240 "until [ -s '$here/health.beat' ]; do
		systemctl is-active -q '$watch' || [ -s '$here/health.beat' ] || exit 1
		sleep 0.2
	done" </dev/null || die "the watch of $name does not work: $(said)"
	head -c "$marker" | put - 0644 "$here/watch.marker"
}

# said: what the watch said last.
said() {
	inside 30 "journalctl -q -u '$watch' -n 3 -o cat --no-pager" </dev/null | tr '\n' ' '
}

main "$@"
