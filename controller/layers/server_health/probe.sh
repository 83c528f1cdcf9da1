# How the servers of each place are: what their watches left, and which of those have not been heard of for long.
root=${root-}
read -r now _ <"$root/proc/uptime"
now=${now%.*}

health() {
	plain /opt/reconcile/server || return 0
	for path in "$inside"/opt/reconcile/server/*; do
		name=${path##*/} here=/opt/reconcile/server/${path##*/}
		case $name in '' | *[!a-z0-9._-]*) continue ;; esac
		want "$here/health.json" "$here/watch.marker"
		plain "$here/watch.marker" || continue
		# A look at the server may take a minute and a half when that is silent; the watch looks every ten seconds.
		beat=''
		if plain "$here/health.beat" && [ -f "$path/health.beat" ]; then read -r beat _ <"$path/health.beat"; fi
		case $beat in '' | *[!0-9]*) beat=0 ;; esac
		if [ "$beat" -gt "$now" ] || [ $((now - beat)) -gt 240 ]; then printf 'silent %s\n' "$name"; fi
	done
}

places health || return 1
wanted
