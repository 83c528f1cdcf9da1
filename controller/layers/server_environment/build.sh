# Builds a Python environment in a place, beside whatever is there, and looks whether it is right.
# Arguments: the place; its digest; uv's version, the name and SHA-256 of its wheel; the version of Python, and whether
# its C headers are needed (yes, no); the index ("": the usual one), whether pre-releases are taken ("": uv's own rule);
# where else wheels are, requirements and overrides, one a line.
# On standard input: what look.py is to find and to write into the marker, JSON.
main() {
	place=$1 digest=$2 uv_version=$3 uv_wheel=$4 uv_sha256=$5 python=$6 headers=$7 index=$8 prerelease=$9
	shift 9
	wheels=$1 requirements=$2 overrides=$3
	enter_place "$place"
	work=/opt/reconcile/env/$digest.build
	put - 0644 "$work/order.json"
	if inside 30 "[ -e '/opt/reconcile/env/$digest.json' ] && [ -x '/opt/reconcile/env/$digest/bin/python' ]" </dev/null; then
		stale "environment $digest is there already"
	fi
	inside 30 "rm -f '/opt/reconcile/env/$digest.json'" </dev/null || die "cannot remove the marker of environment $digest"
	uv=/opt/reconcile/uv/$uv_version/uv
	bring_uv
	printf '%s\n' "$requirements" | put - 0644 "$work/requirements.txt" || exit
	printf '%s\n' "$overrides" | put - 0644 "$work/overrides.txt" || exit
	options | put - 0644 "$work/options" || exit
	for name in build look.py read_flags.py; do
		program "$name" | put - 0644 "$work/$name" || exit
	done
	inside_job 14000 "exec sh '$work/build' '$digest' '$uv' '$python' '$headers'" ||
		die "cannot build environment $digest in $(place_name): exit $?"
	inside 120 "rm -rf '$work'" </dev/null || die "cannot remove $work in $(place_name)"
}

# options: those of uv, one word a line.
options() {
	if [ -n "$index" ]; then printf -- '--default-index\n%s\n' "$index"; fi
	if [ -n "$prerelease" ]; then printf -- '--prerelease\n%s\n' "$prerelease"; fi
	printf '%s\n' "$wheels" | while IFS= read -r _where; do
		if [ -n "$_where" ]; then printf -- '--find-links\n%s\n' "$_where"; fi
	done
}

# bring_uv: into the place, from what this host has kept of it. One job at a time fetches it.
bring_uv() {
	if [ "$(inside 60 "'$uv' --version 2>/dev/null | cut -d ' ' -f 2" </dev/null)" = "$uv_version" ]; then return; fi
	kept=$RECONCILE_STATE/uv/$uv_version
	mkdir -p "$kept"
	exec 9>"$kept/lock"
	flock -w 900 9 || die "another job has been fetching uv for 15 minutes"
	if [ ! -x "$kept/uv" ]; then fetch_uv; fi
	exec 9>&-
	put "$kept/uv" 0755 "$uv"
}

fetch_uv() {
	if [ "$(digest "$kept/$uv_wheel")" != "$uv_sha256" ]; then
		wheel_from_folder || wheel_from_index
		found=$(digest "$kept/$uv_wheel.part")
		if [ "$found" != "$uv_sha256" ]; then
			rm -f "$kept/$uv_wheel.part"
			die "what came as $uv_wheel has the SHA-256 $found, not $uv_sha256: it was thrown away"
		fi
		mv -f "$kept/$uv_wheel.part" "$kept/$uv_wheel"
	fi
	unpack "$kept/$uv_wheel" "uv-$uv_version.data/scripts/uv" >"$kept/uv.new" || die "cannot unpack $uv_wheel"
	chmod 0755 "$kept/uv.new"
	sync "$kept/uv.new"
	mv -f "$kept/uv.new" "$kept/uv"
	rm -f "$kept/$uv_wheel"
}

# wheel_from_folder: from the first folder of wheels in the place that has it.
wheel_from_folder() {
	for _where in $(printf '%s\n' "$wheels" | grep '^/[A-Za-z0-9._/-]*$'); do
		if inside 600 "[ -f '$_where/$uv_wheel' ] && cat '$_where/$uv_wheel'" </dev/null >"$kept/$uv_wheel.part"; then
			return 0
		fi
	done
	return 1
}

# wheel_from_index: by the page that an index has of each project (PEP 503), where links may be relative.
wheel_from_index() {
	_page=${index:-https://pypi.org/simple}
	_page=${_page%/}/uv/
	download "$_page" "$kept/page" || die "cannot fetch $_page, for uv; put $uv_wheel into a folder under engine.wheels"
	_link=$(tr '>' '\n' <"$kept/page" | sed -n 's/.*href="\([^"]*'"$uv_wheel"'\)[#"].*/\1/p' | head -n 1)
	rm -f "$kept/page"
	case $_link in
	'') die "$_page has no $uv_wheel" ;;
	http://* | https://*) ;;
	/*) _link=$(printf '%s' "$_page" | sed 's,^\(https*://[^/]*\)/.*,\1,')$_link ;;
	*) _link=$_page$_link ;;
	esac
	download "$_link" "$kept/$uv_wheel.part" || die "cannot fetch $_link"
}

download() {
	if command -v curl >/dev/null; then
		curl -fsSL --retry 5 --connect-timeout 30 --speed-limit 1024 --speed-time 60 -o "$2" "$1" </dev/null
	elif command -v wget >/dev/null; then
		wget -q --tries=5 --timeout=60 -O "$2" "$1" </dev/null
	else
		die "there is neither curl nor wget on this host"
	fi
}

# unpack ARCHIVE MEMBER: prints one file of a zip archive, with whatever this host has for that.
unpack() {
	if command -v python3 >/dev/null; then
		python3 -c 'import sys, zipfile; sys.stdout.buffer.write(zipfile.ZipFile(sys.argv[1]).read(sys.argv[2]))' "$1" "$2"
	elif command -v unzip >/dev/null; then
		unzip -p "$1" "$2"
	else
		perl -MIO::Uncompress::Unzip=unzip -e 'unzip $ARGV[0] => "-", Name => $ARGV[1] or exit 1' "$1" "$2"
	fi
}

main "$@"
