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
