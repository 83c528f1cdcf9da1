# What the configs of containers of interest mount of their host, wherever in the cluster they lie, and whether that is
# there on this very host. A link that leads nowhere is missing.
root=${root-}
pve=$root/etc/pve

set --
for id in $guests; do
	for file in "$pve"/nodes/*/lxc/"$id".conf; do
		if [ -f "$file" ]; then
			set -- "$@" "$file"
			printf 'guest|%s\n' "$id"
		fi
	done
done
[ $# -gt 0 ] || return 0

# Sections (PVE/LXC/Config.pm takes no other line for a header), mounts, and the network's file systems.
found=$(
	grep -aHE -e '^\[[A-Za-z][A-Za-z0-9_:-]+\][[:space:]]*$' -e '^mp[0-9]+:' -e '^lxc\.mount\.entry[[:space:]]*[:=]' \
		-e '^[^ ]+ [^ ]+ (nfs4?|cifs|smb3|ceph|9p|fuse\.[^ ]+) ' "$@" "$root/proc/mounts"
)
[ $? -le 1 ] || return 1

# there PATH: what is there: dir, file, missing; unknown when nobody says. What lies in a file system of the network may
# hang for ever and is asked for in a process of its own.
there() {
	for mounted in $network; do
		case $1/ in
		"$mounted"/*)
			name=$1
			while :; do
				case $name in */*) name=${name%%/*}%${name#*/} ;; *) break ;; esac
			done
			case $(detached "mount$name" 3 stat -L -c %F -- "$root$1") in
			"exit 0${nl}directory") what='dir' ;;
			"exit 0$nl"*) what='file' ;;
			"exit 1$nl"*": No such file or directory") what='missing' ;;
			*) what='unknown' ;;
			esac
			return
			;;
		esac
	done
	if [ -d "$root$1" ]; then what='dir'; elif [ -e "$root$1" ]; then what='file'; else what='missing'; fi
}

# Into lines by the shell itself: `read` takes a system call for each byte, and there are thousands.
before=$IFS IFS=$nl
set -f
# shellcheck disable=SC2086 # one word a line
set -- $found
set +f
IFS=$before

network=''
for line; do
	case $line in
	"$root/proc/mounts:"*) line=${line#* } network="$network ${line%% *}" ;;
	esac
done

file='' section=''
for line; do
	case $line in "$pve"/*) ;; *) continue ;; esac
	if [ "${line%%.conf:*}" != "$file" ]; then file=${line%%.conf:*} section=''; fi
	line=${line#*.conf:}
	case $line in
	\[*) section=$line ;;
	mp*)
		path=${line#*:}
		case $path in *[,\ ]volume=*) path=${path#*volume=} ;; esac
		path=${path# } path=${path%%,*}
		;;
	*)
		path=${line#lxc.mount.entry} path=${path#*[:=]}
		set -f
		# shellcheck disable=SC2086 # its fields
		set -- $path
		set +f
		path=${1-}
		case $path in *\\*) path=$(printf %b "$path") ;; esac
		;;
	esac
	case $section$path in
	\[* | /dev/*) continue ;;
	/*) there "$path" && printf 'mount|%s|%s|%s\n' "${file##*/}" "$what" "$line" ;;
	esac
done
