# Who has a node of NVIDIA's or a VFIO group open: asked where there is something that could be.
root=${root-}

# held MODULE: whether the module is used by more than the modules above it.
held() {
	[ -r "$root/sys/module/$1/refcnt" ] || return 1
	read -r count <"$root/sys/module/$1/refcnt"
	set -- "$root/sys/module/$1/holders"/*
	if [ -e "$1" ]; then count=$((count - $#)); fi
	[ "$count" -gt 0 ]
}

set -- "$root"/dev/vfio/[0-9]*
if ! [ -e "$1" ] && ! held nvidia && ! held nvidia_uvm && ! held nouveau; then
	echo idle
	return 0
fi
# shellcheck disable=SC2016 # run by a shell of its own
detached card-users 10 sh -c 'find "$1"/proc/[0-9]*/fd \( -lname "/dev/nvidia*" -o -lname "/dev/vfio/[0-9]*" \
	-o -lname "/dev/dri/*" \) -printf "%h %l\n" 2>/dev/null | sort -u | while read -r folder node; do
	process=${folder%/fd} name="" group=""
	read -r name <"$process/comm" 2>/dev/null || continue
	while IFS= read -r line; do
		case $line in 0::*) group=${line#0::} ;; esac
	done <"$process/cgroup"
	printf "%s|%s|%s|%s\n" "${process##*/}" "$node" "$group" "$name"
done' sh "$root"
