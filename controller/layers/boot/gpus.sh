# At boot, before anything else loads a driver: each card to the driver that its owner needs, by its address; the
# modules; device nodes. Every value comes from the file: modules to load, and cards by address, vendor:device, driver,
# minor and UUID ("-": none). A card that is not the recorded one is left alone, and one that got another minor gets
# no node, so that nobody is given another's card.
# Arguments: nodes (only make nodes), or nothing.
main() {
	file=/etc/reconcile/gpus
	[ -r "$file" ] || { echo "there is no $file"; exit 1; }
	failed=0
	if [ "${1-}" = nodes ]; then
		nodes
		exit "$failed"
	fi
	each override_card
	each settle
	while read -r key module _; do
		[ "$key" = load ] || continue
		modprobe "$module" </dev/null || complain "$module cannot be loaded"
	done <"$file"
	each probe
	nodes
	exit "$failed"
}

complain() {
	echo "$*"
	failed=1
}

# each FUNCTION: for every card that is there and is the recorded one.
each() {
	while read -r key address id driver minor _; do
		[ "$key" = card ] || continue
		device=/sys/bus/pci/devices/$address
		if ! [ -d "$device" ]; then
			complain "there is no device at $address"
			continue
		fi
		read -r vendor <"$device/vendor"
		read -r model <"$device/device"
		if [ "${vendor#0x}:${model#0x}" != "$id" ]; then
			complain "the device at $address is ${vendor#0x}:${model#0x}, not $id: it is left alone"
			continue
		fi
		"$1"
	done <"$file"
}

# functions: the card's own, and all of the card where it is a virtual machine's.
functions() {
	if [ "$driver" = vfio-pci ]; then printf '%s\n' "${device%.*}".*; else printf '%s\n' "$device"; fi
}

override_card() {
	for function in $(functions); do
		echo "$driver" >"$function/driver_override" || complain "the override of ${function##*/} cannot be set"
	done
}

# settle: off any other driver (one that an initramfs loaded), and on vfio-pci where it is a virtual machine's.
settle() {
	if [ "$driver" = vfio-pci ] && ! [ -d /sys/bus/pci/drivers/vfio-pci ]; then
		modprobe vfio-pci </dev/null || complain "vfio-pci cannot be loaded"
	fi
	for function in $(functions); do
		now=$(driver_of "$function")
		if [ -n "$now" ] && [ "$now" != "$driver" ]; then release "$function" || continue; fi
		if [ "$driver" = vfio-pci ] && [ "$now" != "$driver" ]; then
			echo "${function##*/}" >/sys/bus/pci/drivers_probe
		fi
	done
}

probe() {
	if [ -z "$(driver_of "$device")" ]; then echo "$address" >/sys/bus/pci/drivers_probe; fi
	now=$(driver_of "$device")
	[ "$now" = "$driver" ] || complain "$address is on ${now:-no driver}, not on $driver"
}

driver_of() {
	link=$(readlink "$1/driver") && echo "${link##*/}"
}

# release FUNCTION: nobody uses a card this early. Where somebody does, it stays where it is; a driver would wait in the
# kernel, where no signal reaches.
release() {
	group=$(readlink "$1/iommu_group")
	if [ -n "$(find /proc/[0-9]*/fd -lname "/dev/vfio/${group##*/}" 2>/dev/null)" ]; then
		complain "${1##*/} is on $now and in use: it stays there"
		return 1
	fi
	( echo "${1##*/}" >"$1/driver/unbind" ) &
	patience=150
	while kill -0 $! 2>/dev/null; do
		patience=$((patience - 1))
		if [ "$patience" = 0 ]; then
			complain "$now does not let go of ${1##*/}"
			return 1
		fi
		sleep 0.1
	done
}

nodes() {
	wanted=''
	each node
	[ -n "$wanted" ] || return 0
	make nvidiactl 195 255 -c 255
	if [ -z "$(uvm)" ]; then modprobe nvidia_uvm </dev/null || :; fi
	major=$(uvm)
	if [ -z "$major" ]; then
		complain "nvidia-uvm is not loaded"
		return 0
	fi
	# with -u, -c is a minor of nvidia-uvm and not a card's (nvidia-modprobe.c)
	make nvidia-uvm "$major" 0 -u -c 0
	make nvidia-uvm-tools "$major" 1 -u -c 0
}

# uvm: the major of nvidia-uvm, which changes from one load to another.
uvm() {
	while read -r number name; do
		if [ "$name" = nvidia-uvm ]; then echo "$number"; fi
	done </proc/devices
}

node() {
	information=/proc/driver/nvidia/gpus/$address/information
	[ -r "$information" ] || return 0
	found=''
	while IFS=: read -r name value; do
		case $name in *'Device Minor'*) found=${value##*[[:space:]]} ;; esac
	done <"$information"
	if [ "$found" != "$minor" ]; then
		rm -f "/dev/nvidia$found"
		complain "$address has minor $found, not $minor as recorded: it gets no node"
		return 0
	fi
	wanted=yes
	make "nvidia$minor" 195 "$minor" -c "$minor"
}

# make NAME MAJOR MINOR OPTIONS: by nvidia-modprobe, which knows the modes, or by hand where it is not installed.
make() {
	name=$1 number=$2 unit=$3
	shift 3
	if command -v nvidia-modprobe >/dev/null; then nvidia-modprobe "$@" </dev/null; fi
	if ! [ -c "/dev/$name" ]; then
		rm -f "/dev/$name"
		mknod -m 666 "/dev/$name" c "$number" "$unit" || complain "/dev/$name cannot be made"
	fi
}

main "$@"
