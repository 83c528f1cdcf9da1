# Sent once to the shell that answers looks. Everything after it is one `look` line for each look.
# Reads only; what it writes is its own scratch directory under /run/reconcile.
LC_ALL=C
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export LC_ALL PATH
umask 077
set -u
nl='
'
run_dir=/run/reconcile

# section NAME FUNCTION: runs the function, prints its output, stderr and exit code in the frame.
section() {
	out=$("$2" 2>"$scratch" </dev/null; rc=$?; printf .; exit "$rc")
	rc=$?
	out=${out%.}
	err=
	if [ -s "$scratch" ]; then err=$(head -c 4096 "$scratch"); fi
	printf '%s section %s %d %d %d\n%s%s\n' "$nonce" "$1" "$rc" "${#out}" "${#err}" "$out" "$err"
}

# files PATH...: the contents of files, each line after its path, after one line "size path" for each, so that
# a missing last newline, and a file that cannot be carried as text, can be told.
files() {
	for file; do
		shift
		if [ -f "$file" ]; then set -- "$@" "$file"; fi
	done
	[ $# -gt 0 ] || return 0
	stat -L -c '%s %Y %n' -- "$@"
	printf -- '--\n'
	grep -aH '' -- "$@"
	[ $? -le 1 ]
}

# look NONCE MAX_AGE GUESTS: one whole answer.
look() {
	nonce=$1 max_age=$2 guests=$3
	mkdir -p "$run_dir" 2>/dev/null
	scratch=$run_dir/stderr.$$
	printf '%s begin\n' "$nonce"
	sections
	rm -f "$scratch"
	printf '%s end\n' "$nonce"
}
