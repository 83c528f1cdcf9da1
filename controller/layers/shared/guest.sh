# What scripts about one container ($id) have at hand; stands before them.

# runs: whether the container runs: its monitor listens on its command socket (PVE::LXC::check_running).
runs() {
	grep -q "@/var/lib/lxc/$id/command\$" /proc/net/unix
}

# init: the process id of the container's init; nothing when it has none.
init() {
	timeout 10 lxc-info -n "$id" -p -H 2>/dev/null </dev/null || :
}

# started: when the container's init was started, in clock ticks (hundredths of a second) since boot; 0: it has none.
started() {
	_init=$(init)
	if [ -n "$_init" ] && [ -r "/proc/$_init/stat" ] && read -r _stat <"/proc/$_init/stat"; then
		# shellcheck disable=SC2086 # its fields after the process's name
		set -- ${_stat##*) }
		printf '%s\n' "${20}"
	else
		printf '0\n'
	fi
}

# ha_manages: whether HA starts, stops and moves the container.
ha_manages() {
	[ -f /etc/pve/ha/resources.cfg ] && grep -q "^ct:[[:space:]]*${id}[[:space:]]*\$" /etc/pve/ha/resources.cfg
}

# quorate: whether this node may write in its cluster; one that is in no cluster of several always may.
quorate() {
	_members=$(cat /etc/pve/.members) || return 1
	case $_members in *'"quorate": 0'*) return 1 ;; esac
}

# online NODE: whether this node sees the other in the cluster.
online() {
	grep -q "^ *\"$1\": {.*\"online\": 1" /etc/pve/.members
}

# stop_it: shuts the container down, by force after a minute.
stop_it() {
	pct shutdown "$id" --timeout 60 --forceStop 1 </dev/null || said=$?
	within 30 stopped || die "CT $id still runs after pct shutdown (exit ${said:-0})"
}

# within SECONDS COMMAND: until the command says yes.
within() {
	left=$(($1 * 10))
	until "$2"; do
		left=$((left - 1))
		[ "$left" -gt 0 ] || return 1
		sleep 0.1
	done
}

stopped() {
	! runs
}
