# What runs on this node, the storages of the cluster, and who has the disks of containers of interest whose node is
# not online: those may be taken over from here, and nobody else may have them then.
root=${root-}
pve=$root/etc/pve

node='' online=' '
while IFS= read -r line; do
	case $line in
	*'"nodename":'*) node=${line#*\"nodename\": \"} node=${node%%\"*} ;;
	*'"online": 1'*) name=${line#*\"} online="$online${name%%\"*} " ;;
	esac
done <"$pve/.members"
if [ -z "$node" ]; then
	echo "/etc/pve does not say which node this is" >&2
	return 1
fi

sockets=$(grep -o '@/var/lib/lxc/[0-9]*/command$' "$root/proc/net/unix")
[ $? -le 1 ] || return 1
for socket in $sockets; do
	socket=${socket%/command}
	printf 'runs|lxc|%s\n' "${socket##*/}"
done
for file in "$root"/run/qemu-server/*.pid; do
	if [ -f "$file" ] && read -r pid <"$file" && [ -d "$root/proc/$pid" ]; then
		file=${file##*/}
		printf 'runs|qemu|%s\n' "${file%.pid}"
	fi
done

# disks CONFIG: the RBD images of its main section, and what Ceph says of each.
disks() {
	while IFS= read -r line; do
		case $line in
		\[*) break ;;
		rootfs:* | mp[0-9]*:*) ;;
		*) continue ;;
		esac
		value=${line#*:}
		case $value in
		*[,\ ]volume=*) value=${value#*volume=} ;;
		esac
		value=${value# } value=${value%%,*}
		case $value in
		/* | *\ *) continue ;;
		*:*) watched "${value%%:*}" "${value#*:}" ;;
		esac
	done <"$1"
}

watched() {
	said=$(rbd_status "$1" "$2" detached "rbd-$1-$2" 4 </dev/null) || return 0
	printf 'image|%s|%s|%s\n' "$id" "$1" "$2"
	while IFS= read -r line; do
		printf 'said|%s\n' "$line"
	done <<-END
		$said
	END
}

# One that was taken out of the cluster (pvecm delnode) is in no list any more, and its folder stays.
for directory in "$pve"/nodes/*; do
	name=${directory##*/}
	case "$online$node " in *" $name "*) continue ;; esac
	for id in $guests; do
		if [ -f "$directory/lxc/$id.conf" ]; then disks "$directory/lxc/$id.conf"; fi
	done
done

printf '==storage\n'
if [ -f "$pve/storage.cfg" ]; then cat "$pve/storage.cfg"; fi
