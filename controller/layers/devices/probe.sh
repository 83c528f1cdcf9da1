# The config files of this node's guests, and of guests on nodes that are not online: their files can be read here only.
root=${root-}
pve=$root/etc/pve

if [ -f "$root/sys/fs/cgroup/cgroup.controllers" ]; then echo 'cgroup 2'; else echo 'cgroup 1'; fi

node='' online=' '
while IFS= read -r line; do
	case $line in
	*'"nodename":'*) node=${line#*\"nodename\": \"} node=${node%%\"*} ;;
	*'"online": 1'*) name=${line#*\"} online="$online${name%%\"*} " ;;
	esac
done <"$pve/.members"
if [ -z "$node" ] || ! [ -d "$pve/nodes/$node" ]; then
	echo "/etc/pve does not say which node this is" >&2
	return 1
fi
printf 'node %s\n' "$node"

# Cards that running VMs hold, by PVE's own list (PVE/QemuServer/PCI.pm): address, VM, and which process or until when.
if [ -f "$root/run/qemu-server/pci-id-reservations" ]; then
	while read -r address vmid _; do
		printf 'reserved %s %s\n' "$address" "$vmid"
	done <"$root/run/qemu-server/pci-id-reservations"
fi

while read -r major name; do
	case $major in
	Block*) break ;;
	[0-9]*) printf 'character %s %s\n' "$major" "$name" ;;
	esac
done <"$root/proc/devices"

set -- "$pve/mapping/pci.cfg"
for directory in "$pve"/nodes/*; do
	name=${directory##*/}
	case $online in *" $name "*) [ "$name" = "$node" ] || continue ;; esac
	set -- "$@" "$directory"/lxc/[1-9]*.conf "$directory"/qemu-server/[1-9]*.conf
done
printf '==files\n'
files "$@"
