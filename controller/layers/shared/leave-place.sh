# Takes a server out of a place: stops and disables its unit there, or removes it with all that was written for it.
# Arguments: stop | remove, the place, the server's name, whose it has to be (ModelServer/NAME, as its marker says).
# Environments and weights stay: others may use them.
main() {
	action=$1 place=$2 name=$3 object=$4
	enter_place "$place"
	wait_for_systemd
	unit=reconcile-$name.service watch=reconcile-$name-watch.service
	marked=$(inside 30 "cat '/opt/reconcile/server/$name/marker.json'" </dev/null) || stale "$name has no marker there"
	case $marked in *"\"$object\""*) ;; *) stale "$name is another's there" ;; esac
	inside 660 "for unit in '$watch' '$unit'; do
	[ -e \"/etc/systemd/system/\$unit\" ] || continue
	systemctl disable -q \"\$unit\" || exit
	systemctl stop \"\$unit\" || exit
	systemctl reset-failed \"\$unit\" 2>/dev/null
done
:" </dev/null || die "systemd cannot stop and disable $unit in $(place_name)"
	[ "$action" = remove ] || return 0
	# The marker goes last: what is cut off is seen as ours and gone on with.
	inside 120 "cd /opt/reconcile/server && [ -d '$name' ] && [ ! -L '$name' ] || exit
rm -rf '/etc/systemd/system/$unit' '/etc/systemd/system/$watch' && systemctl daemon-reload || exit
find '$name' -mindepth 1 ! -path '$name/marker.json' -delete && rm -f '$name/marker.json' && rmdir '$name'" </dev/null ||
		die "cannot remove what was written for $name in $(place_name)"
}

main "$@"
