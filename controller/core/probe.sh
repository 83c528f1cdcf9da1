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
entered=''

# section NAME FUNCTION: runs the function, adds its output, stderr and exit code to the frame. All of it is printed at
# once: each piece would be a packet of its own, to be waited for and unpacked by itself.
section() {
	out=$("$2" 2>"$scratch" </dev/null; rc=$?; printf .; exit "$rc")
	rc=$?
	out=${out%.}
	err=
	if [ -s "$scratch" ]; then err=$(head -c 4096 "$scratch"); fi
	frame="$frame$nonce section $1 $rc ${#out} ${#err}$nl$out$err$nl"
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

# look NONCE MAX_AGE GUESTS: one whole answer. A nonce is TOKEN-RANDOM; the token is that of who asks.
look() {
	nonce=$1 max_age=$2 guests=$3 frame=''
	printf '%s begin\n' "$nonce"
	[ -d "$run_dir" ] || entered=''
	if [ -n "$entered" ] || enter; then
		read -r now _ </proc/uptime
		printf '%s %s %s\n' "$myself" "${now%.*}" "${nonce%-*}" >"$at_work"
		sections
		printf '' >"$at_work"
	else
		frame="$nonce stuck $stuck$nl"
	fi
	printf '%s%s end\n' "$frame" "$nonce"
}

# enter: makes ready for looks, and asks what cannot change while this shell lives (uid, kernel). False, with pid and
# age of what is `stuck`, while an earlier look still hangs on this host, so that there is never a pile of them.
enter() {
	entered=1 myself='' at_work=/dev/null scratch=/dev/null uid=$(id -u) kernel=$(uname -srm)
	[ -d "$run_dir" ] || mkdir -p "$run_dir" 2>/dev/null
	[ -w "$run_dir" ] || return 0
	for file in "$run_dir"/look.*; do
		pid=${file##*.}
		if [ ! -d "/proc/$pid" ]; then
			rm -f "$file" "$run_dir/stderr.$pid"
		elif hangs "$file" "$pid"; then
			stuck="$pid $age" entered=''
			return 1
		fi
	done
	myself=$(process_start "$$") at_work=$run_dir/look.$$ scratch=$run_dir/stderr.$$
	trap 'rm -f "$at_work" "$scratch"' EXIT
}

# hangs FILE PID: whether the look that FILE marks hangs, since `age` seconds. One of the same asker was given up, else
# there would be no other; it is given a moment to end, for its connection may have been cut. One of another asker is
# at work until it is too old for that.
hangs() {
	for _ in 1 2 3; do
		# Empty between looks, and gone or cut when its shell is just about to end or to look.
		read -r started begun token 2>/dev/null <"$1" || return 1
		[ -n "$token" ] || return 1
		read -r now _ </proc/uptime
		age=$((${now%.*} - begun))
		if [ "$token" != "${nonce%-*}" ] && [ "$age" -le 30 ]; then return 1; fi
		[ "$(process_start "$2")" = "$started" ] || return 1
		if [ "$age" -gt 1 ]; then return 0; fi
		sleep 1
	done
}

# detached NAME SECONDS COMMAND...: a tool that can hang in the kernel, in a session of its own, at most one alive.
# Prints its exit code and output, from less than max_age seconds ago (0: always anew); waits at most SECONDS for it,
# and then says "hung" with the second of the host's uptime at which it was started. One that can be killed is killed
# after a minute, and one that fills memory with its output (/run is no disk) when it has written 512 KiB.
detached() {
	tool=$run_dir/tool.$1 patience=$2
	shift 2
	read -r now _ </proc/uptime
	now=${now%.*}
	pid='' started='' begun=0
	if [ -f "$tool.pid" ]; then read -r pid started begun <"$tool.pid"; fi
	if [ -n "$pid" ] && [ "$(process_start "$pid")" = "$started" ]; then
		if [ $((now - begun)) -gt 60 ]; then kill -9 "-$pid" 2>/dev/null; fi
		printf 'hung %s\n' "$begun"
		return 0
	fi
	at=''
	if [ -f "$tool.at" ]; then read -r at <"$tool.at"; fi
	if [ -z "$at" ] || [ ! -f "$tool.done" ] || [ $((now - at)) -ge "$max_age" ]; then
		# shellcheck disable=SC2016 # the inner shell expands these
		setsid sh -c 'tool=$1; shift; (ulimit -S -f 1024; exec "$@") >"$tool.out" 2>&1 </dev/null
			printf "exit %s\n" "$?" >"$tool.new"; head -c 65536 "$tool.out" >>"$tool.new"
			mv "$tool.new" "$tool.done"' sh "$tool" "$@" >/dev/null 2>&1 &
		pid=$!
		printf '%s %s %s\n' "$pid" "$(process_start "$pid")" "$now" >"$tool.pid"
		if ! timeout "$patience" tail --pid="$pid" -s 0.02 -f /dev/null 2>/dev/null; then
			printf 'hung %s\n' "$now"
			return 0
		fi
		printf '%s\n' "$now" >"$tool.at"
		rm -f "$tool.pid"
	fi
	cat "$tool.done"
}

# process_start PID: when the process was started, in clock ticks since boot; nothing when there is none.
process_start() {
	[ -r "/proc/$1/stat" ] || return 0
	read -r stat <"/proc/$1/stat" 2>/dev/null || return 0
	# shellcheck disable=SC2086 # split into fields on purpose
	set -- ${stat##*) }
	shift 19 2>/dev/null && printf '%s' "$1"
}
