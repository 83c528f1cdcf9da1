# The units of servers in each place: their files, what they were made from, the digest of their secrets.
root=${root-}

units() {
	if plain /opt/reconcile/server; then
		for path in "$inside"/opt/reconcile/server/*; do
			name=${path##*/}
			case $name in '' | *[!a-z0-9._-]*) continue ;; esac
			if plain "/opt/reconcile/server/$name" && [ -d "$path" ]; then tell "$name"; fi
		done
	fi
	plain /etc/systemd/system || return 0
	for path in "$inside"/etc/systemd/system/reconcile-?*.service; do
		name=${path##*/reconcile-}
		name=${name%.service}
		case $name in *-watch | gpus | '' | *[!a-z0-9._-]*) continue ;; esac # of a server's watch; of host.boot
		[ -d "$inside/opt/reconcile/server/$name" ] || tell "$name"
	done
}

# tell NAME: all of one server.
tell() {
	printf 'server %s\n' "$1"
	here=/opt/reconcile/server/$1 kept=''
	want "/etc/systemd/system/reconcile-$1.service" "$here/marker.json" "$here/args.json" "$here/salt"
	for file in salt secrets.env config.yaml; do
		if plain "$here/$file" && [ -f "$inside$here/$file" ]; then kept="$kept $inside$here/$file"; fi
	done
	if [ -n "$kept" ]; then
		# shellcheck disable=SC2086 # paths without spaces
		digest=$(cat -- $kept | head -c 1048576 | sha256sum)
		printf 'secrets %s %s\n' "$1" "${digest%% *}"
	fi
	if plain "$here/note.sh"; then printf 'note %s\n' "$1"; fi
	plain "/etc/systemd/system/reconcile-$1.service.d" || return 0
	for file in "$inside/etc/systemd/system/reconcile-$1.service.d"/*.conf; do
		file=${file##*/}
		case $file in '*.conf' | *[!A-Za-z0-9._-]*) continue ;; esac
		printf 'dropin %s %s\n' "$1" "$file"
	done
}

places units || return 1
wanted
