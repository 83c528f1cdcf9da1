# Takes a card from one driver to another, by its address alone, or only keeps other drivers from it.
# Arguments: bind | guard, the card's address, the wanted driver, the driver that it was seen on ("": none), the digest
# of what this node's VMs claim. Cut off anywhere, it leaves a card that the next run goes on from.
main() {
	what=$1 address=$2 driver=$3 seen=$4 claims=$5
	device=/sys/bus/pci/devices/$address
	[ -d "$device" ] || stale "there is no device at $address any more"
	now=$(driver_of "$device")
	[ "$now" = "$seen" ] || stale "the card at $address is on ${now:-no driver} now"
	[ "$(claimed)" = "$claims" ] || stale "what VMs claim has changed since it was read"
	if [ -r /run/qemu-server/pci-id-reservations ] && grep -q "^${address%.*}[. ]" /run/qemu-server/pci-id-reservations; then
		stale "a VM has taken the card at $address"
	fi
	if [ "$what" = guard ]; then
		override "$device" "$driver"
		return
	fi
	users=$(users_of "$device")
	[ -z "$users" ] || die "the card at $address is in use by $users"
	if [ "$driver" = vfio-pci ] && ! [ -d /sys/bus/pci/drivers/vfio-pci ]; then
		modprobe vfio-pci </dev/null || die "vfio-pci cannot be loaded"
	fi
	give "$device"
	# A VM is given all functions of a card; what else is on a container's card is nobody's business.
	if [ "$driver" = vfio-pci ]; then
		for other in "${device%.*}".*; do
			if [ "$other" != "$device" ]; then give "$other"; fi
		done
	fi
	node
}

# give DEVICE: the wanted driver and no other has it afterwards. A driver that is not loaded takes it when it is.
give() {
	override "$1" "$driver"
	now=$(driver_of "$1")
	if [ "$now" = "$driver" ]; then return; fi
	if [ -n "$now" ]; then release "$1"; fi
	[ -d "/sys/bus/pci/drivers/$driver" ] || return 0
	printf '%s' "${1##*/}" >/sys/bus/pci/drivers_probe || die "the kernel refuses to probe ${1##*/}"
	now=$(driver_of "$1")
	[ "$now" = "$driver" ] || die "$driver does not take ${1##*/}: $(dmesg 2>/dev/null | grep -F "${1##*/}" | tail -n 1)"
}

override() {
	printf '%s\n' "$2" >"$1/driver_override" || die "the driver_override of ${1##*/} cannot be set"
	read -r set_to <"$1/driver_override"
	[ "$set_to" = "$2" ] || die "the driver_override of ${1##*/} is $set_to"
}

# release DEVICE: a driver whose device is in use waits in the kernel, where no signal reaches (nv-pci.c), so that
# `timeout` would wait with it.
release() {
	( printf '%s' "${1##*/}" >"$1/driver/unbind" ) &
	at_work=$!
	patience=150
	while kill -0 "$at_work" 2>/dev/null; do
		patience=$((patience - 1))
		[ "$patience" -gt 0 ] || die "$now does not let go of ${1##*/}, in use by $(users_of "$1")"
		sleep 0.1
	done
	wait "$at_work" || die "${1##*/} cannot be unbound from $now"
	left=$(driver_of "$1")
	[ -z "$left" ] || [ "$left" = "$driver" ] || die "${1##*/} is on $left after it was unbound from $now"
}

driver_of() {
	link=$(readlink "$1/driver") || return 0
	printf '%s\n' "${link##*/}"
}

# users_of DEVICE: processes that have a node of it open: a card's, its VFIO group's, or a display's.
users_of() {
	set -- "$1" "/dev/vfio/$(basename "$(readlink "$1/iommu_group")")"
	information=/proc/driver/nvidia/gpus/${1##*/}/information
	if [ -r "$information" ]; then
		set -- "$@" "/dev/nvidia$(sed -n 's/^Device Minor:[[:space:]]*//p' "$information")"
	fi
	for display in "$1"/drm/card* "$1"/drm/renderD*; do
		if [ -e "$display" ]; then set -- "$@" "/dev/dri/${display##*/}"; fi
	done
	shift
	for wanted; do
		find /proc/[0-9]*/fd -lname "$wanted" 2>/dev/null
	done | while read -r descriptor; do
		process=${descriptor%/fd/*}
		read -r name <"$process/comm" 2>/dev/null || continue
		printf '%s (%s)\n' "${process##*/}" "$name"
	done | sort -u | tr '\n' ' '
}

# claimed: a digest of all configs that can claim a card. The order is that of bytes.
claimed() {
	if ! [ -d /etc/pve/nodes ]; then
		printf 'none\n'
		return
	fi
	LC_ALL=C
	for file in /etc/pve/qemu-server/[1-9]*.conf /etc/pve/mapping/pci.cfg; do
		if [ -f "$file" ]; then cat "$file"; fi
	done | digest /dev/stdin
}

# node: the card's own node; no udev rule makes one.
node() {
	information=/proc/driver/nvidia/gpus/$address/information
	if [ -r "$information" ] && command -v nvidia-modprobe >/dev/null; then
		minor=$(sed -n 's/^Device Minor:[[:space:]]*//p' "$information")
		nvidia-modprobe -c "$minor" </dev/null || printf 'nvidia-modprobe -c %s failed\n' "$minor"
	fi
}

main "$@"
