# Loads the installed driver, in place of a loaded one if there is one, whose users are stopped and started again.
# Arguments: version, flavour; of the loaded one ("" if none is): version, flavour, its installer's name in our
# directory ("": there is none); ids of CTs and names of services to stop.
main() {
	version=$1 flavour=$2 old=$3 old_flavour=$4 installer=$5 containers=$6 services=$7
	[ "$(loaded)" = "$old" ] || stale "driver $(loaded) is loaded now"
	[ "$(modinfo -F version nvidia 2>/dev/null)" = "$version" ] || stale "the module on disk is not $version any more"
	[ -z "$old" ] || only_those
	mkdir -p /run/reconcile
	was=$(cards)
	back=''
	trap again EXIT
	trap 'exit 143' HUP INT TERM
	if [ -n "$old" ]; then
		stop_users
		unload || die "driver $old cannot be unloaded: $said"
	fi
	if modprobe_said nvidia; then
		rm -f "$RECONCILE_STATE/driver-refused"
	else
		refused "$said"
		if [ -n "$old" ]; then go_back; fi
		die "driver $version did not load: $said${back:+; $back}"
	fi
	modprobe_said nvidia_uvm || die "nvidia_uvm did not load: $said"
	make_nodes
}

# loaded: the version of the module in the kernel, nothing when there is none.
loaded() {
	[ -r /sys/module/nvidia/version ] || return 0
	cat /sys/module/nvidia/version
}

# only_those: every user belongs to a CT or a service that is to be stopped.
only_those() {
	# Paths below /proc: no white space in them.
	# shellcheck disable=SC2044
	for descriptor in $(find /proc/[0-9]*/fd -lname '/dev/nvidia*' 2>/dev/null); do
		pid=${descriptor#/proc/} pid=${pid%%/*}
		group=$(sed -n 's/^0:://p' "/proc/$pid/cgroup" 2>/dev/null) || continue
		case $group in
		'') continue ;;
		/lxc/* | /lxc.payload.*)
			id=${group#/lxc?} id=${id#payload.} id=${id%%/*}
			case " $containers " in *" $id "*) continue ;; esac
			;;
		*.service | *.service/*)
			unit=${group%%.service*} unit=${unit##*/}
			case " $services " in *" $unit "*) continue ;; esac
			;;
		esac
		stale "process $pid ($group) uses the driver now"
	done
}

# stop_users: what is stopped is written down first, so that it is started again whatever happens to this script.
stop_users() {
	running=''
	for service in $services; do
		if systemctl -q is-active "$service.service"; then running="$running $service"; fi
	done
	stopped=''
	for service in $running; do
		printf 'service %s\n' "$service" >>/run/reconcile/driver-stopped
		systemctl stop "$service.service" </dev/null || die "cannot stop $service"
	done
	for id in $containers; do
		grep -q "@/var/lib/lxc/$id/command\$" /proc/net/unix || continue
		stopped="$stopped $id"
		pct shutdown "$id" --timeout 60 --forceStop 1 </dev/null || die "CT $id does not stop (exit $?)"
	done
}

# again: what was stopped runs again. A container waits for its config where the cards or majors have other numbers
# now: it would be given another's card.
again() {
	rc=$?
	trap - EXIT
	if [ -s /run/reconcile/driver-stopped ]; then
		while read -r _ service; do
			systemctl start "$service.service" </dev/null || printf 'cannot start %s again\n' "$service" >&2
		done </run/reconcile/driver-stopped
		rm -f /run/reconcile/driver-stopped
	fi
	now=$(cards)
	for id in ${stopped-}; do
		if [ "$now" = "$was" ]; then
			pct start "$id" </dev/null || printf 'cannot start CT %s again\n' "$id" >&2
		else
			printf 'CT %s is started when its config fits the cards as they are numbered now\n' "$id"
		fi
	done
	exit "$rc"
}

# cards: which card has which minor, and the majors.
cards() {
	for information in /proc/driver/nvidia/gpus/*/information; do
		[ -r "$information" ] || continue
		printf '%s ' "$information"
		sed -n 's/^Device Minor:[[:space:]]*//p' "$information"
	done
	sed -n '/nvidia/p' /proc/devices
}

# unload: all of NVIDIA's modules, those above first. `said` tells why not.
unload() {
	for module in nvidia_drm nvidia_modeset nvidia_peermem nvidia_uvm nvidia; do
		[ -d "/sys/module/$module" ] || continue
		if ! said=$(timeout 60 rmmod "$module" 2>&1 </dev/null); then
			# what went already comes back
			modprobe nvidia_uvm 2>/dev/null || :
			return 1
		fi
	done
}

modprobe_said() {
	said=$(timeout 120 modprobe "$1" 2>&1 </dev/null) && [ -d "/sys/module/$1" ]
}

# refused WHY: noted, so that it is not tried again and again.
refused() {
	kernel_said=$(dmesg 2>/dev/null | grep -E 'NVRM|nvidia' | tail -n 3 | tr '\n' ' ') || :
	printf '%s %s %s %s %s\n' "$version" "$flavour" "$(uname -r)" "$1" "$kernel_said" >"$RECONCILE_STATE/driver-refused.new"
	mv -f "$RECONCILE_STATE/driver-refused.new" "$RECONCILE_STATE/driver-refused"
}

# go_back: the driver that was loaded before is installed and loaded again.
go_back() {
	if [ -z "$installer" ] || [ ! -f "$RECONCILE_STATE/drivers/$installer" ]; then
		back="there is no installer of $old here to go back to"
		return
	fi
	set -- "$RECONCILE_STATE/drivers/$installer" --silent --dkms --no-x-check --no-nouveau-check --skip-module-load \
		"--kernel-module-type=$old_flavour"
	if sh "$@" </dev/null && timeout 120 modprobe nvidia </dev/null && timeout 120 modprobe nvidia_uvm </dev/null; then
		make_nodes
		back="$old is installed and loaded again"
	else
		back="going back to $old failed as well: see /var/log/nvidia-installer.log"
	fi
}

# make_nodes: nodes of the cards; no udev rule makes them. With -u, -c is a minor of nvidia-uvm (nvidia-modprobe.c).
make_nodes() {
	for information in /proc/driver/nvidia/gpus/*/information; do
		[ -r "$information" ] || continue
		minor=$(sed -n 's/^Device Minor:[[:space:]]*//p' "$information")
		nvidia-modprobe -c "$minor" </dev/null || printf 'nvidia-modprobe -c %s failed\n' "$minor"
	done
	nvidia-modprobe -c 255 </dev/null || printf 'nvidia-modprobe -c 255 failed\n'
	nvidia-modprobe -u -c 0 </dev/null || printf 'nvidia-modprobe -u -c 0 failed\n'
}

main "$@"
