# Runs in the place. Arguments: the environment's digest, where uv is, the version of Python, whether its headers are
# needed. Beside it lie requirements.txt, overrides.txt, options, and what looks at the result.
main() {
	digest=$1 uv=$2 wanted=$3 headers=$4
	env=/opt/reconcile/env/$digest
	cd "$env.build" || exit
	# What a build that was cut off has fetched is still there for the next.
	export UV_CACHE_DIR=/opt/reconcile/uv/cache UV_PYTHON_INSTALL_DIR=/opt/reconcile/uv/python UV_NO_PROGRESS=1
	if [ -s /etc/ssl/certs/ca-certificates.crt ]; then export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt; fi
	rm -rf "$env"
	python=$(find_python) || exit
	"$uv" venv --quiet --no-project --python "$python" "$env" || exit
	set --
	while IFS= read -r word; do set -- "$@" "$word"; done <options
	# A folder that has everything is all that is asked: no index has to answer then.
	if grep -q '^--find-links$' options && ! grep -q '^--default-index$' options &&
		install --dry-run --no-index "$@" >/dev/null 2>&1; then
		set -- --no-index "$@"
	fi
	install "$@" || exit
	"$env/bin/python" -I look.py order.json read_flags.py
}

install() {
	"$uv" pip install --python "$env/bin/python" --overrides overrides.txt -r requirements.txt "$@" </dev/null
}

# find_python: one that is there; where engines compile at start, one that has its headers, which may have to be fetched.
find_python() {
	_found=$("$uv" python find --no-project "$wanted" 2>/dev/null)
	if [ -n "$_found" ] && { [ "$headers" = no ] || has_headers "$_found"; }; then
		printf '%s\n' "$_found"
		return
	fi
	if "$uv" python install --quiet --no-bin "$wanted" >&2; then
		"$uv" python find --no-project --managed-python "$wanted"
		return
	fi
	if [ -z "$_found" ]; then
		printf 'there is no Python %s here, and none can be fetched\n' "$wanted" >&2
		return 1
	fi
	printf '%s has no headers, and no other Python can be fetched: what is compiled at start will fail\n' "$_found" >&2
	printf '%s\n' "$_found"
}

has_headers() {
	"$1" -c 'import os, sysconfig; raise SystemExit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
}

main "$@"
