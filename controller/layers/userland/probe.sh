# NVIDIA's libraries inside the containers of interest that run, and what nvidia-smi says in there.
root=${root-}

sockets=$(grep -o '@/var/lib/lxc/[0-9]*/command$' "$root/proc/net/unix")
[ $? -le 1 ] || return 1
module=''
if [ -r "$root/sys/module/nvidia/version" ]; then read -r module <"$root/sys/module/nvidia/version"; fi

for id in $guests; do
	case "$nl$sockets$nl" in
	*"$nl@/var/lib/lxc/$id/command$nl"*) ;;
	*) continue ;;
	esac
	pid=$(timeout 5 lxc-info -n "$id" -p -H 2>/dev/null)
	inside=$root/proc/$pid/root
	if [ -z "$pid" ] || ! [ -d "$inside/usr" ]; then
		printf 'between %s\n' "$id"
		continue
	fi
	printf 'container %s\n' "$id"
	same=''
	for library in "$inside"/usr/lib/*-linux-gnu/libnvidia-ml.so.1 "$inside"/usr/lib64/libnvidia-ml.so.1 "$inside"/usr/lib/libnvidia-ml.so.1; do
		# The link's text alone: followed from here it would lead through this host.
		target=$(readlink "$library") || continue
		printf 'library %s %s\n' "$id" "${target##*/}"
		if [ -n "$module" ] && [ "${target##*/}" = "libnvidia-ml.so.$module" ]; then same=yes; fi
	done
	for package in "$inside"/var/lib/dpkg/info/libnvidia-compute-*.list "$inside"/var/lib/dpkg/info/libnvidia-ml1*.list \
		"$inside"/var/lib/dpkg/info/nvidia-utils-*.list "$inside"/var/lib/dpkg/info/libcuda1*.list; do
		[ -e "$package" ] || continue
		package=${package##*/}
		printf 'package %s %s\n' "$id" "${package%.list}"
	done
	if [ -x "$inside/usr/bin/nvidia-smi" ] && [ -n "$same" ]; then
		printf 'smi %s\n' "$id"
		# lxc-attach begins with a copy of itself (CVE-2019-5736), which is larger than what `detached` lets be written.
		# shellcheck disable=SC2016 # run by a shell of its own
		detached "smi-$id" 10 sh -c 'ulimit -S -f unlimited
			exec lxc-attach -n "$1" --clear-env -v PATH="$2" -- sh -c "ulimit -f 1024; exec nvidia-smi $3"' sh "$id" "$PATH" \
			'--query-gpu=uuid,pci.bus_id --format=csv,noheader'
		printf '.\n'
	elif [ -x "$inside/usr/bin/nvidia-smi" ]; then
		printf 'program %s\n' "$id"
	fi
done
