# Takes a container from a node that is gone: renames its config to this node.
# Arguments: the container's id, the node, the SHA-256 of the config, its RBD volumes as STORAGE:IMAGE.
main() {
	id=$1 source=$2 seen=$3
	shift 3
	from=/etc/pve/nodes/$source/lxc/$id.conf conf=/etc/pve/lxc/$id.conf
	for other in /etc/pve/nodes/*/lxc/"$id".conf /etc/pve/nodes/*/qemu-server/"$id".conf; do
		[ "$other" = "$from" ] || [ ! -e "$other" ] || stale "$other is there now"
	done
	still_so
	for volume; do unwatched "${volume%%:*}" "${volume#*:}"; done
	with_pve_lock "$id" take
}

still_so() {
	[ -f "$from" ] || stale "the config of CT $id does not lie on $source now"
	[ "$(digest "$from")" = "$seen" ] || stale "$from has changed since it was read"
	! ha_manages || stale "HA manages CT $id now"
	quorate || stale "this node is in no quorate part of its cluster now"
	! online "$source" || stale "$source is back"
}

# unwatched STORAGE IMAGE: nobody has the image mapped; what Ceph does not answer is no answer.
unwatched() {
	said=$(rbd_status "$1" "$2" timeout 20) || die "Ceph does not say who has $1:$2"
	case $said in
	*'"watchers":[]'* | *'"watchers":{}'*) ;;
	*'"watchers"'*) stale "somebody has $1:$2 now: $said" ;;
	*) die "Ceph does not say who has $1:$2: $said" ;;
	esac
}

# A rename replaces what is there, in pmxcfs as elsewhere: it must not be there.
take() {
	still_so
	[ ! -e "$conf" ] || stale "$conf is there now"
	mv -n "$from" "$conf" || die "cannot rename $from to $conf"
	[ ! -e "$from" ] || die "$from is still there after the rename"
	[ "$(digest "$conf")" = "$seen" ] || die "$conf is not what $from was"
}

main "$@"
