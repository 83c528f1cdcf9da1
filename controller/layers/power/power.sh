# Starts, stops or restarts a container, if it is still as it was seen.
# Arguments: start | stop | restart, the container's id, the SHA-256 of its config, when its init was started in clock
# ticks since boot (0: it did not run), why it is restarted (a digest, so that a restart that does not help is not repeated).
main() {
	action=$1 id=$2 seen=$3 since=$4 why=$5
	conf=/etc/pve/lxc/$id.conf
	[ -f "$conf" ] || stale "CT $id is not on this node"
	[ "$(digest "$conf")" = "$seen" ] || stale "$conf has changed since it was read"
	! ha_manages || stale "HA manages CT $id now"
	case $action in
	start) ! runs || stale "CT $id runs already" ;;
	stop | restart) [ "$(started)" = "$since" ] || stale "CT $id has been stopped or started since it was seen" ;;
	*) die "cannot $action a container" ;;
	esac
	if [ "$action" != start ]; then stop_it; fi
	if [ "$action" != stop ]; then start_it; fi
}

start_it() {
	rm -f "/run/reconcile/edited/$id" "/run/reconcile/restarted/$id"
	pct start "$id" </dev/null || said=$?
	within 30 up || die "CT $id does not run after pct start (exit ${said:-0}); pct start $id --debug says more"
	mkdir -p /run/reconcile/restarted
	printf '%s %s\n' "$(started)" "$why" >"/run/reconcile/restarted/$id.new"
	mv -f "/run/reconcile/restarted/$id.new" "/run/reconcile/restarted/$id"
}

# What pct says is not enough: a start that only queues (HA) or an init that ends at once is no running container.
up() {
	runs && [ "$(lxc-info -n "$id" -s -H 2>/dev/null </dev/null)" = RUNNING ] && [ "$(started)" != 0 ]
}

main "$@"
