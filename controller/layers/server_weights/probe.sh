# The models of ours in each place: their markers, which files lie in their directories; what disks have free.
# A directory may lie on a disk that does not answer, so whatever touches it runs detached.
root=${root-}

weights() {
	free_space
	if [ "$place" = - ]; then offers; fi
	plain /opt/reconcile/weights || return 0
	for path in "$inside"/opt/reconcile/weights/*.token; do
		key=${path##*/}
		key=${key%.token}
		case $key in *[!0-9a-f]*) continue ;; esac
		plain "/opt/reconcile/weights/$key.token" || continue
		digest=$(head -c 1024 "$path" | sha256sum)
		printf 'asked %s %s\n' "$key" "${digest%% *}"
	done
	for path in "$inside"/opt/reconcile/weights/*.json; do
		key=${path##*/}
		key=${key%.json}
		case $key in *[!0-9a-f]*) continue ;; esac
		if ! plain "/opt/reconcile/weights/$key.json" || ! [ -f "$path" ]; then continue; fi
		want "/opt/reconcile/weights/$key.json"
		directory=$(sed -n '/^ "real": "\/.*"$/{s/^ "real": "//;s/"$//;p;q;}' <"$path")
		[ -n "$directory" ] || continue
		# shellcheck disable=SC2016 # the inner shell expands these
		detached "weights-$place-$key" 5 sh -c 'way=$1 rest=${2#/}
			find "$3" -maxdepth 0 -mtime +29 -printf "due\n" 2>/dev/null
			while [ -n "$rest" ]; do
				way=$way/${rest%%/*}
				[ ! -L "$way" ] && [ -d "$way" ] || exit 0
				case $rest in */*) rest=${rest#*/} ;; *) rest="" ;; esac
			done
			exec find "$way" -maxdepth 8 -type f -printf "%s %T@ %P\n"' \
			sh "$inside" "$directory" "$inside/opt/reconcile/weights/$key.compared" | listing
	done
}

# offers: what this host offers to others.
offers() {
	for path in "$root"/run/reconcile/offers/*; do
		case ${path##*/} in *[!0-9a-f]*) continue ;; esac
		read -r port digest <"$path" || continue
		printf 'offer %s %s %s\n' "${path##*/}" "$port" "$digest"
	done
}

listing() {
	read -r how _ || return 0
	if [ "$how" = hung ]; then
		printf 'hangs %s\n' "$key"
		return
	fi
	while IFS= read -r line; do
		if [ "$line" = due ]; then printf 'due %s\n' "$key"; else printf 'file %s %s\n' "$key" "$line"; fi
	done
}

# free_space: of the file systems that a place sees, in steps so coarse that the answer seldom changes.
free_space() {
	[ -r "$root/proc/$inside_pid/mountinfo" ] || return 0
	set --
	while read -r _ _ _ _ mount rest; do
		rest=${rest##* - }
		case ${rest%% *} in
		ext[234] | xfs | btrfs | bcachefs | f2fs | zfs | overlay | nfs | nfs4 | cifs | ceph | 9p | virtiofs | fuseblk) ;;
		*) continue ;;
		esac
		# A path with a space or a backslash in it is written with a backslash.
		case $mount in *\\*) ;; *) [ $# -ge 64 ] || set -- "$@" "$inside$mount" ;; esac
	done <"$root/proc/$inside_pid/mountinfo"
	[ $# -gt 0 ] || return 0
	detached "disks-$place" 5 stat -f -c '%i %a %S %n' -- "$@" | {
		read -r how _
		[ "$how" != hung ] || return 0
		while read -r id blocks size mount; do
			case $id in *[!0-9a-f]*) continue ;; esac
			free=$((blocks * size / 67108864 * 67108864))
			[ "$free" -lt 68719476736 ] || free=$((free / 1073741824 * 1073741824))
			mount=${mount#"$inside"}
			printf 'disk %s %s %s\n' "$id" "$free" "${mount:-/}"
		done
	}
}

places weights || return 1
wanted
