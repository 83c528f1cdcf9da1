# Which servers of ours are in each place: folders with our marker, units by their names, what of them is at work.
root=${root-}

servers() {
	slice=$(slice_of "$inside_pid")
	for way in /opt/reconcile/server /etc/systemd/system /etc/systemd/system/multi-user.target.wants; do
		plain "$way" || continue
		for path in "$inside$way"/*; do
			name=${path##*/}
			case $way:$name in
			/opt/reconcile/server:*) what=server ;;
			*-watch.service | *:reconcile-gpus.service) continue ;; # of a server's watch; of host.boot
			*.wants:reconcile-?*.service) what=enabled ;;
			*/system:reconcile-?*.service) what=unit ;;
			*) continue ;;
			esac
			if [ "$what" != server ]; then
				name=${name#reconcile-}
				name=${name%.service}
			fi
			case $name in '' | *[!a-z0-9._-]*) continue ;; esac
			if [ "$what" = server ] && ! { plain "$way/$name" && [ -d "$path" ]; }; then continue; fi
			printf '%s %s\n' "$what" "$name"
			if [ "$what" = server ]; then want "/opt/reconcile/server/$name/marker.json"; fi
			if [ "$what" = unit ] && at_work "$slice/reconcile-$name.service"; then printf 'active %s\n' "$name"; fi
		done
	done
}

places servers || return 1
wanted
