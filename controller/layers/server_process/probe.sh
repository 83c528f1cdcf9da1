# What runs in each place: the processes of servers' units, how they were started and ended, who listens on which port.
root=${root-}
records=/run/reconcile-server

processes() {
	if plain /dev/shm && [ -d "$inside/dev/shm" ]; then
		room=$(stat -f -c '%b %S' -- "$inside/dev/shm") && printf 'shm %d\n' "$((${room% *} * ${room#* }))"
	fi
	slice=$(slice_of "$inside_pid") names=''
	for path in "$slice"/reconcile-?*.service "$inside$records"/?*.started "$inside$records"/?*.ends; do
		name=${path##*/}
		name=${name#reconcile-}
		name=${name%.*}
		case $name in *-watch | '' | *[!a-z0-9._-]*) continue ;; esac
		case " $names " in *" $name "*) ;; *) names="$names $name" ;; esac
	done
	for name in $names; do
		printf 'server %s\n' "$name"
		noted
		main=''
		if [ -d "$slice/reconcile-$name.service" ]; then first "$slice/reconcile-$name.service"; fi
		[ -n "$main" ] || down
	done
	listeners
}

# noted: what the unit itself wrote at its starts and ends. It is a container's: nothing else than it should be is told.
noted() {
	last=0
	plain "$records" || return 0
	if [ -f "$inside$records/$name.started" ] && plain "$records/$name.started"; then
		digest='' at='' secrets=''
		read -r digest at secrets <"$inside$records/$name.started"
		case $digest:$at:${secrets#-} in
		*[!0-9a-f:]* | :* | *::*[!:]*) ;;
		*) printf 'started %s %s %s %s\n' "$name" "$digest" "$at" "${secrets:--}" && last=$at ;;
		esac
	fi
	[ -f "$inside$records/$name.ends" ] && plain "$records/$name.ends" || return 0
	while read -r at result code status _; do
		case $at in '' | *[!0-9]*) continue ;; esac
		case $result$code$status in '' | *[!A-Za-z0-9-]*) continue ;; esac
		printf 'end %s %s %s %s %s\n' "$name" "$at" "$result" "$code" "${status:-0}"
		last=$at
	done <"$inside$records/$name.ends"
}

# first CGROUP: the unit's main process: the oldest of those whose parent is not among them.
first() {
	pids=' ' since=0 count=0
	while read -r pid; do pids="$pids$pid "; done <"$1/cgroup.procs"
	for pid in $pids; do
		stat=''
		[ -r "$root/proc/$pid/stat" ] && read -r stat <"$root/proc/$pid/stat"
		[ -n "$stat" ] || continue
		count=$((count + 1))
		# shellcheck disable=SC2086 # the fields after the process's name: its parent is the 2nd, its start the 20th
		set -- ${stat##*) }
		case $pids in *" $2 "*) continue ;; esac
		if [ -z "$main" ] || [ "${20}" -lt "$since" ]; then main=$pid since=${20}; fi
	done
	[ -n "$main" ] || return 0
	printf 'main %s %s %s %s\n' "$name" "$main" "$since" "$((count - 1))"
	printf 'argv %s ' "$name"
	head -c 131072 "$root/proc/$main/cmdline" | tr '\n\0' '\2\1'
	printf '\n'
	# Of its environment this alone is read: the rest may be secret.
	gpus=$(head -c 1048576 "$root/proc/$main/environ" | tr '\n\0' ' \n' | grep -a '^CUDA_VISIBLE_DEVICES=')
	gpus=${gpus#*=}
	case $gpus in '' | *[!A-Za-z0-9,-]*) ;; *) printf 'gpus %s %s\n' "$name" "$gpus" ;; esac
}

# down: systemd starts it again 10 s after an end, if it does at all.
down() {
	if [ "$last" -gt 0 ] && [ "$(date +%s)" -le "$((last + 30))" ]; then return; fi
	printf 'down %s\n' "$name"
}

# listeners: who owns the sockets that listen. Finding that goes through all open files of the host, so it is remembered
# for as long as each socket is still its owner's.
listeners() {
	sockets='' unknown='' cache=$run_dir/ports.$place known=''
	for table in tcp tcp6; do
		[ -r "$root/proc/$inside_pid/net/$table" ] || continue
		while read -r _ local _ state _ _ _ _ _ inode _; do
			case $state in st) continue ;; 0A) ;; *) break ;; esac # those that listen come first
			sockets="$sockets $((0x${local##*:})):$inode"
		done <"$root/proc/$inside_pid/net/$table"
	done
	[ -n "$sockets" ] || return 0
	if [ -f "$cache" ]; then
		while read -r inode pid start unit command; do
			if [ "$pid" != 0 ] && [ "$(process_start "$pid")" != "$start" ]; then continue; fi
			known="$known$nl$inode $pid $start $unit $command"
		done <"$cache"
	fi
	for socket in $sockets; do
		case $known in *"$nl${socket#*:} "*) ;; *) unknown="$unknown${unknown:+$nl}socket:[${socket#*:}]" ;; esac
	done
	if [ -n "$unknown" ]; then find_owners; fi
	for socket in $sockets; do
		line=${known#*"$nl${socket#*:} "}
		line=${line%%"$nl"*}
		# shellcheck disable=SC2086 # pid, start, unit, command
		set -- $line
		printf 'listen %s %s %s %s\n' "${socket%%:*}" "$1" "$3" "${4:--}"
	done
}

find_owners() {
	owners=$(find "$root"/proc/[0-9]*/fd -maxdepth 1 -lname 'socket:*' -printf '%h %l\n' 2>/dev/null | grep -F -- "$unknown")
	for socket in $sockets; do
		inode=${socket#*:}
		case $known in *"$nl$inode "*) continue ;; esac
		pid=0 start=0 unit=- command=-
		case $owners in
		*" socket:[$inode]"*)
			pid=${owners%%" socket:[$inode]"*}
			pid=${pid##*"$nl"}
			pid=${pid%/fd}
			pid=${pid##*/}
			start=$(process_start "$pid")
			while IFS=: read -r number _ group; do
				if [ "$number" = 0 ]; then unit=${group##*/}; fi
			done <"$root/proc/$pid/cgroup"
			read -r command <"$root/proc/$pid/comm"
			case $unit in '' | *[!A-Za-z0-9@._:-]*) unit=- ;; esac
			case $command in '' | *[!A-Za-z0-9@._:/-]*) command=- ;; esac
			;;
		esac 2>/dev/null
		known="$known$nl$inode $pid ${start:-0} $unit $command"
	done
	[ -w "$run_dir" ] || return 0
	printf '%s\n' "${known#"$nl"}" >"$cache.new" && mv -f "$cache.new" "$cache"
}

places processes || return 1
printf '==files\n'
