# Reboots the host, a moment after this has ended well.
# Argument: why (a digest). $named are the guests that may be running, " lxc/ID qemu/ID ": who else runs was not asked.
main() {
	if [ -f /etc/pve/.members ]; then
		members=$(cat /etc/pve/.members)
		all=$(printf '%s\n' "$members" | grep -c '"online": [01]') || :
		left=$(($(printf '%s\n' "$members" | grep -c '"online": 1') - 1)) || :
		[ "$all" = 0 ] || [ $((2 * left)) -gt "$all" ] || stale "without this node $left of $all would be left, no quorum"
	fi
	sockets=$(grep -o '@/var/lib/lxc/[0-9]*/command$' /proc/net/unix) || :
	for socket in $sockets; do
		socket=${socket%/command}
		asked "lxc/${socket##*/}"
	done
	for file in /run/qemu-server/*.pid; do
		if [ -f "$file" ] && read -r pid <"$file" && [ -d "/proc/$pid" ]; then
			file=${file##*/}
			asked "qemu/${file%.pid}"
		fi
	done
	systemd-run --quiet --collect --unit=reconcile-reboot --on-active=2 --timer-property=AccuracySec=100ms \
		systemctl reboot </dev/null || die "systemd does not reboot"
}

asked() {
	case $named in
	*" $1 "*) ;;
	*) stale "$1 runs now" ;;
	esac
}

main "$@"
