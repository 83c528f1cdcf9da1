# Fetches a driver's installer into our own directory and checks it. What was fetched before is gone on from.
# Arguments: the file's name, where it lies (a URL, or a path on this host), its SHA-256 ("": not given).
main() {
	name=$1 from=$2 wanted=$3
	directory=$RECONCILE_STATE/drivers
	file=$directory/$name
	mkdir -p "$directory"
	case $from in
	/*) copy ;;
	*) download ;;
	esac
	found=$(digest "$file.part")
	if [ -n "$wanted" ] && [ "$found" != "$wanted" ]; then
		rm -f "$file.part"
		die "what came from $from has the SHA-256 $found, not $wanted: it was thrown away"
	fi
	# NVIDIA's archive carries a checksum of itself.
	if ! sh "$file.part" --check </dev/null >"$file.check" 2>&1; then
		said=$(tail -n 3 "$file.check" | tr '\n' ' ')
		rm -f "$file.part" "$file.check"
		die "what came from $from is no whole installer: $said"
	fi
	rm -f "$file.check"
	sync "$file.part"
	mv -f "$file.part" "$file"
	printf '%s\n' "$found" >"$file.sha256.new"
	mv -f "$file.sha256.new" "$file.sha256"
	printf '%s has the SHA-256 %s\n' "$file" "$found"
}

copy() {
	[ -f "$from" ] || die "there is no $from on this host"
	progress 0 "$(stat -c %s "$from")"
	cp -f "$from" "$file.part" || die "cannot copy $from"
}

download() {
	if command -v curl >/dev/null; then
		curl -fsSL --retry 5 --retry-delay 2 --connect-timeout 30 --speed-limit 1024 --speed-time 60 -C - \
			-o "$file.part" "$from" </dev/null &
	elif command -v wget >/dev/null; then
		wget -q -c --tries=5 --timeout=60 -O "$file.part" "$from" </dev/null &
	else
		die "there is neither curl nor wget on this host"
	fi
	at_work=$!
	trap 'kill "$at_work" 2>/dev/null || :' EXIT
	while kill -0 "$at_work" 2>/dev/null; do
		if [ -f "$file.part" ]; then progress "$(stat -c %s "$file.part")" 0; fi
		sleep 1
	done
	rc=0
	wait "$at_work" || rc=$?
	trap - EXIT
	# A server that has nothing beyond what is here already: the file was whole, and is looked at now.
	case $rc in
	0 | 33 | 36) return ;;
	esac
	if [ -z "$wanted" ] || [ "$(digest "$file.part")" != "$wanted" ]; then
		die "cannot fetch $from: exit $rc; what came of it is kept"
	fi
}

main "$@"
