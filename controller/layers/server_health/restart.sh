# Restarts a server that runs and is not well, if it is still the run that was judged.
# Arguments: the place, the server's name, its main process as the watch saw it (PID START).
main() {
	place=$1 name=$2 seen=$3
	enter_place "$place"
	unit=reconcile-$name.service
	now=$(inside 30 "pid=\$(systemctl show -p MainPID --value '$unit') && [ \"\$pid\" -gt 0 ] && stat=\$(cat /proc/\$pid/stat) &&
		set -- \${stat##*) } && shift 19 && echo \"\$pid \$1\"" </dev/null) || stale "$name does not run any more"
	[ "$now" = "$seen" ] || stale "$name was started anew since"
	inside 660 "systemctl restart '$unit'" </dev/null || die "systemd cannot restart $unit in $(place_name)"
}

main "$@"
