# Moves a container to another node of the cluster and leaves it stopped there.
# Arguments: the container's id, the target node, the SHA-256 of its config, when its init was started in clock ticks since
# boot (0: it did not run).
main() {
	id=$1 target=$2 seen=$3 since=$4
	conf=/etc/pve/lxc/$id.conf there=/etc/pve/nodes/$target/lxc/$id.conf
	[ -f "$conf" ] || stale "CT $id is not on this node"
	[ "$(digest "$conf")" = "$seen" ] || stale "$conf has changed since it was read"
	! ha_manages || stale "HA manages CT $id now"
	quorate || stale "this node is in no quorate part of its cluster now"
	online "$target" || stale "$target is not in contact with this node now"
	[ "$(started)" = "$since" ] || stale "CT $id has been stopped or started since it was seen"
	was_up=''
	if runs; then
		was_up=yes
		stop_it
	fi
	said=0
	pct migrate "$id" "$target" </dev/null || said=$?
	if [ -e "$conf" ] || [ ! -f "$there" ]; then
		bring_back
		die "CT $id has not been moved: pct migrate ended with $said$back"
	fi
	if grep -q '^lock: migrate' "$there"; then
		die "CT $id is on $target and still locked there (pct migrate ended with $said): run pct unlock $id on $target"
	fi
}

# What ran before and could not be moved runs on, as pct migrate --restart has it too.
bring_back() {
	back=''
	if [ -z "$was_up" ] || [ ! -f "$conf" ]; then return; fi
	if pct start "$id" </dev/null; then back='; it has been started again'; else back='; it could not be started again'; fi
}

main "$@"
