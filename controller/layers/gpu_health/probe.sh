# Every NVIDIA function on the PCI bus, what the loaded module says of its cards, the device nodes, and nvidia-smi.
root=${root-}

# link PATH: the last part of where a symlink in sysfs leads, without a process.
link() {
	target=$(cd -P "$1" 2>/dev/null && printf '%s' "$PWD") && printf '%s' "${target##*/}"
}

# attribute FILE: its first line, or nothing.
attribute() {
	value=''
	if [ -r "$1" ]; then IFS= read -r value <"$1" 2>/dev/null || :; fi
	printf '%s' "$value"
}

# Where something is wrong with a card, the kernel's log says what: only then is it read.
trouble=''

for device in "$root"/sys/bus/pci/devices/*; do
	vendor=''
	if [ -r "$device/vendor" ]; then read -r vendor <"$device/vendor"; fi
	[ "$vendor" = 0x10de ] || continue
	group=$(link "$device/iommu_group")
	mates=''
	for mate in "$device"/iommu_group/devices/*; do
		[ -e "$mate" ] && mates="$mates ${mate##*/}"
	done
	width=$(attribute "$device/current_link_width")
	if [ "$width" = 63 ]; then trouble=yes; fi
	printf 'pci|%s|%s|%s|%s|%s|%s|%s|%s|%s|%s\n' "${device##*/}" "$(attribute "$device/device")" \
		"$(attribute "$device/class")" "$(link "$device/driver")" "$(attribute "$device/driver_override")" \
		"$group" "${mates# }" "$(attribute "$device/numa_node")" "$width" "$(attribute "$device/max_link_width")"
done

version=$root/proc/driver/nvidia/version
if [ -r "$version" ]; then
	IFS= read -r line <"$version" && printf 'module|%s\n' "$line"
	for gpu in "$root"/proc/driver/nvidia/gpus/*/information; do
		[ -r "$gpu" ] || continue
		address=${gpu%/information}
		while IFS= read -r line; do
			printf 'gpu|%s|%s\n' "${address##*/}" "$line"
		done <"$gpu"
	done
fi

while read -r major name; do
	case $major:$name in
	Block:*) break ;;
	*:nvidia*) printf 'major|%s|%s\n' "$name" "$major" ;;
	esac
done <"$root/proc/devices"

set -- "$root"/dev/nvidia* "$root"/dev/nvidia-caps/*
if [ -e "$1" ] || [ -L "$1" ]; then stat -c 'node|%n|%F|%t|%T|%a' -- "$@" 2>/dev/null; fi

if [ -r "$version" ]; then
	if command -v nvidia-smi >/dev/null 2>&1; then
		printf 'smi|'
		detached nvidia-smi 10 nvidia-smi --format=csv,noheader,nounits \
			--query-gpu=index,uuid,pci.bus_id,name,driver_version,compute_cap,memory.total,memory.used,ecc.errors.uncorrected.volatile.total
	else
		printf 'smi|none\n'
	fi
fi

if [ -f "$run_dir/tool.nvidia-smi.done" ]; then
	read -r how <"$run_dir/tool.nvidia-smi.done"
	if [ -r "$version" ] && [ "$how" != 'exit 0' ]; then trouble=yes; fi
fi
if [ -n "$trouble" ]; then
	dmesg 2>/dev/null | grep -E 'NVRM: (Xid|.*fallen off the bus)' | tail -n 8 | while IFS= read -r line; do
		printf 'kernel|%s\n' "$line"
	done
fi
