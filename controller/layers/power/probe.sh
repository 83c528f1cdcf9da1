# Of the containers of interest on this node: which run, since when, with which config and which NVIDIA nodes inside.
# pct is Perl and takes half a second; a container runs when its monitor listens on its command socket.
root=${root-}

sockets=$(grep -o '@/var/lib/lxc/[0-9]*/command$' "$root/proc/net/unix")
[ $? -le 1 ] || return 1

# When the host was booted, in seconds of the clock; it is asked only when something runs.
boot_time() {
	while read -r key value _; do
		if [ "$key" = btime ]; then booted=$value; fi
	done <"$root/proc/stat"
}

booted=0
configs='' nodes=''
for id in $guests; do
	case "$nl$sockets$nl" in
	*"$nl@/var/lib/lxc/$id/command$nl"*) ;;
	*) continue ;;
	esac
	# STARTING until all mounts are made: before that its /dev says nothing.
	pid='' state='' stat=''
	while read -r key value; do
		case $key in State:) state=$value ;; PID:) pid=$value ;; esac
	done <<-END
		$(timeout 5 lxc-info -n "$id" -s -p 2>/dev/null)
	END
	if [ -n "$pid" ] && [ -r "$root/proc/$pid/stat" ]; then read -r stat <"$root/proc/$pid/stat"; fi
	if [ -z "$stat" ] || [ "$state" != RUNNING ]; then
		printf 'between|%s\n' "$id"
		continue
	fi
	[ "$booted" != 0 ] || boot_time
	# shellcheck disable=SC2086 # the fields after the process's name, of which the 20th is its start in clock ticks
	set -- ${stat##*) }
	printf 'running|%s|%s|%s\n' "$id" "$pid" "${20}"
	for note in edited restarted; do
		if [ -f "$run_dir/$note/$id" ]; then
			while IFS= read -r line; do
				printf '%s|%s|%s\n' "$note" "$id" "$line"
			done <"$run_dir/$note/$id"
		fi
	done
	config=$root/var/lib/lxc/$id/config
	# Written after the start: by `pct set`, which says nothing of what the container was started with. Both times of
	# the start are cut to seconds, which takes up to two of them away from their sum.
	if [ -f "$config" ] && [ "$(stat -c %Y "$config")" -le $((booted + ${20} / 100 + 1)) ]; then
		configs="$configs $config"
	fi
	nodes="$nodes $root/proc/$pid/root/dev/nvidia* $root/proc/$pid/root/dev/nvidia-caps/*"
done
# shellcheck disable=SC2086 # patterns, of paths without spaces
[ -z "$nodes" ] || stat -c 'node|%n|%F|%t|%T' -- $nodes 2>/dev/null
printf '==files\n'
# shellcheck disable=SC2086
[ -z "$configs" ] || files $configs
