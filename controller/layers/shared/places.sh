# The places of this host where servers can run, for fragments that look into them; stands before those.

# places FUNCTION: calls it for the host itself and for each container of interest that runs, with `place` (- or the id),
# `inside` (the place's root as a path of this host, without a slash at its end) and `inside_pid` (its init) set. Says
# which containers are just between running and not.
#
# A container's root may do what it likes in there. From here a link of its would lead through this host's files, so
# nothing is opened by a path with a link in it (`plain`), and nothing but small plain files is read at all.
# shellcheck disable=SC2154 # root, guests, nl: set where fragments run
places() {
	place=- inside=$root inside_pid=1
	printf 'place -\n'
	"$1"
	_sockets=''
	if [ -n "$guests" ]; then
		_sockets=$(grep -o '@/var/lib/lxc/[0-9]*/command$' "$root/proc/net/unix")
		[ $? -le 1 ] || return 1
	fi
	for place in $guests; do
		case "$nl$_sockets$nl" in
		*"$nl@/var/lib/lxc/$place/command$nl"*) ;;
		*) continue ;;
		esac
		inside_pid=$(timeout 5 lxc-info -n "$place" -p -H 2>/dev/null)
		inside=$root/proc/$inside_pid/root
		if [ -z "$inside_pid" ] || ! [ -d "$inside/usr" ]; then
			printf 'between %s\n' "$place"
			continue
		fi
		printf 'place %s %s\n' "$place" "$inside_pid"
		"$1"
	done
}

# plain PATH: whether PATH in the place is there, without a link anywhere on the way.
plain() {
	_way=$inside _rest=${1#/}
	while [ -n "$_rest" ]; do
		_way=$_way/${_rest%%/*}
		[ ! -L "$_way" ] && [ -e "$_way" ] || return 1
		case $_rest in */*) _rest=${_rest#*/} ;; *) _rest='' ;; esac
	done
}

# want PATH...: remembers small files of the place, by the place's own paths, for `wanted`; what is not plain is left out.
want() {
	for _path; do
		if plain "$_path" && [ -f "$inside$_path" ]; then _wanted="${_wanted-} $inside$_path"; fi
	done
}

# wanted: all that was remembered, as `files` prints it, but for what is larger than 256 KiB.
wanted() {
	printf '==files\n'
	[ -n "${_wanted-}" ] || return 0
	# shellcheck disable=SC2086,SC2046 # paths without spaces
	set -- $(stat -c '%s %n' -- $_wanted | while read -r _size _path; do
		if [ "$_size" -le 262144 ]; then printf '%s\n' "$_path"; fi
	done)
	files "$@"
}

# slice_of PID: the folder in which the place whose init that is keeps the control groups of its services.
slice_of() {
	if [ "$1" = 1 ]; then
		printf '%s/sys/fs/cgroup/system.slice\n' "$root"
		return
	fi
	while IFS=: read -r _number _ _group; do
		[ "$_number" = 0 ] || continue # the unified hierarchy; a host may have others beside it
		_group=${_group%/init.scope}
		printf '%s/sys/fs/cgroup%s/system.slice\n' "$root" "${_group%/}"
		return
	done <"$root/proc/$1/cgroup"
}

# at_work CGROUP: whether a control group has processes, its own or below it.
at_work() {
	[ -r "$1/cgroup.events" ] || return 1
	while read -r _key _value; do
		if [ "$_key" = populated ]; then [ "$_value" = 1 ] && return 0; fi
	done <"$1/cgroup.events"
	return 1
}
