# Takes one order on a host: checks that it may still be begun, lays it down, starts it as a unit, waits for its end.
#
# This text is the head of the order's file, whose digest was compared before it was run; behind it lie the script that
# the unit will run and its standard input.
#
# Everything up to the start happens under one lock, so of two receivers the later sees what the earlier did. The
# generation goes up before anything is started: an order that was cut off anywhere is stale from then on, and if its
# unit was not started, nothing was.
set -eu

state=/var/lib/reconcile
run=/run/reconcile

answer() {
	answered=yes
	printf '%s %s\n' "$nonce" "$*"
}

refuse() {
	answer refused "$@"
	exit 0
}

# leave: whatever ended this, it is told, and nothing of the order is left beside its unit.
# shellcheck disable=SC2317  # a trap calls it
leave() {
	rm -rf "$order"
	if [ -n "$answered" ]; then return; fi
	if [ -n "$begun" ]; then answer lost "cannot $doing"; else answer refused unable "cannot $doing"; fi
}

# put FILE LINE...: in one rename, and on disk.
put() {
	put_to=$1
	shift
	printf '%s\n' "$@" >"$put_to.new"
	sync "$put_to.new"
	mv -f "$put_to.new" "$put_to"
	sync "${put_to%/*}"
}

# sweep: input of orders whose receiver was killed, and of units that are no more.
sweep() {
	for old in "$run"/order.*; do
		if [ -d "$old" ] && [ ! -d "/proc/${old##*.}" ]; then rm -rf "$old"; fi
	done
	for old in "$run"/stdin.*; do
		if [ -e "$old" ] && [ ! -e "/run/systemd/transient/${old#"$run"/stdin.}.service" ]; then rm -f "$old"; fi
	done
}

may_begin() {
	schema=1
	if [ -s "$state/schema" ]; then read -r schema <"$state/schema"; fi
	[ "$schema" = 1 ] || refuse unable "$state was written by a newer release (schema $schema)"

	read -r now rest </proc/uptime
	now=${now%.*}
	if [ -s "$run/lease" ]; then
		{
			read -r holder until
			read -r holder_name
		} <"$run/lease"
		if [ "$holder" != "$lease_id" ] && [ "$until" -gt "$now" ]; then
			refuse lease "held by $holder_name for $((until - now)) s more"
		fi
	fi

	read -r boot </proc/sys/kernel/random/boot_id
	[ "$boot" = "$order_boot" ] || refuse stale "the host has booted since it was looked at"
	generation=0 last=0
	if [ -s "$state/generation" ]; then read -r generation last <"$state/generation"; fi
	[ "$generation" = "$order_generation" ] ||
		refuse stale "the host is at generation $generation, and was at $order_generation when it was looked at"

	# A unit is loaded for some milliseconds after its end: stopping one that is ending only waits for it.
	if [ -e "/run/systemd/transient/$unit.service" ]; then
		dir=$state/steps/$last
		if [ -n "$job" ]; then dir=$state/jobs/$job; fi
		if [ ! -s "$dir/rc" ]; then
			read -r running running_object rest <"$dir/meta"
			refuse busy "$running of $running_object is running"
		fi
		doing="wait until $unit is gone"
		systemctl stop "$unit.service"
	fi
}

lay_down() {
	generation=$((generation + 1))
	if [ -n "$job" ]; then
		dir=$state/jobs/$job
	else
		dir=$state/steps/$generation last=$generation
	fi
	new=$state/new
	rm -rf "$new"
	mkdir "$new"
	tail -c "$((script_size + stdin_size))" "$order/order" | head -c "$script_size" >"$new/script"
	tail -c "$stdin_size" "$order/order" >"$run/stdin.$unit"
	rm "$order/order"
	printf '%s %s %s\n' "$step" "$object" "$boot" >"$new/meta"
	: >"$new/out"
	: >"$new/err"
	mkfifo "$new/ended"
	[ -s "$state/schema" ] || put "$state/schema" 1
	put "$run/lease" "$lease_id $((now + lease_seconds))" "$lease_name"
	put "$state/generation" "$generation $last"
	rm -rf "$dir"
	mv "$new" "$dir"
}

# start: returns when the unit has begun; refuses when it has not and cannot any more.
start() {
	exec 7<>"$dir/ended"
	started=0 begun=yes
	timeout 60 systemd-run --quiet --no-ask-password --collect --unit="$unit" --description="reconcile: $step" \
		--service-type=exec --property=RuntimeMaxSec="$limit" --property=TimeoutStopSec=10 \
		--property=StandardOutput=null --property=ExecStopPost="/bin/sh $dir/script end" \
		/bin/sh "$dir/script" run </dev/null >"$order/said" 2>&1 9>&- || started=$?
	# A script that fails at once is to systemd a start that failed.
	if [ "$started" = 0 ] || [ -e "$dir/began" ]; then return 0; fi
	said=$(head -c 1000 "$order/said" | tr '\n' ' ')
	# Out of the way before the last look at whether it has begun: a shell that finds no directory stops.
	mv "$dir" "$new"
	if [ -e "$new/began" ]; then
		mv "$new" "$dir"
		answer lost "systemd did not say whether it started $unit (rc $started): $said"
		exit 0
	fi
	rm -rf "$new" "$run/stdin.$unit"
	case $said in
	*"already loaded"* | *"already exists"*) refuse busy "$unit is there already" ;;
	esac
	refuse unable "systemd did not start $unit: $said"
}

# tidy: leaves the directories of the steps of the last 20 generations, and of the last 20 jobs that ended.
tidy() {
	for old in "$state"/steps/*; do
		number=${old##*/}
		if [ "$number" = "$last" ] || [ ! -d "$old" ]; then continue; fi
		if [ "$number" -gt "$generation" ] || [ "$number" -le "$((generation - 20))" ]; then rm -rf "$old"; fi
	done
	# The names are ours: no white space in them.
	# shellcheck disable=SC2012
	ls -1t "$state"/jobs/*/rc 2>/dev/null | tail -n +21 | while read -r old; do rm -rf "${old%/rc}"; done
}

# size FILE: how much of it is reported: its last 64 KiB at most.
size() {
	bytes=$(stat -c %s "$1")
	if [ "$bytes" -gt 65536 ]; then bytes=65536; fi
	printf '%s\n' "$bytes"
}

# report: the unit's last words, when it has ended.
report() {
	ended=$(timeout "$((limit + 60))" head -n 1 <&7) || ended=''
	if [ -z "$ended" ]; then
		answer lost "$unit has not ended in its time"
		return
	fi
	answer "done $ended $(size "$dir/out") $(size "$dir/err")"
	tail -c 65536 "$dir/out"
	tail -c 65536 "$dir/err"
}

main() {
	order=$1 script_size=$2 stdin_size=$3 nonce=$4
	shift 4
	unit=$1 job=$2 step=$3 object=$4 limit=$5
	shift 5
	order_generation=$1 order_boot=$2 lease_id=$3 lease_name=$4 lease_seconds=$5
	answered='' begun='' doing="use $state"
	trap leave EXIT
	trap 'exit 1' HUP INT TERM PIPE
	mkdir -p "$state/steps" "$state/jobs"
	for tool in systemctl systemd-run flock; do
		command -v "$tool" >/dev/null || refuse unable "there is no $tool on the host"
	done
	doing="lock $run/lock"
	exec 9>>"$run/lock"
	flock -w 10 9 || refuse busy "another order has been at its start for 10 s"
	sweep
	may_begin
	doing="write to $state"
	lay_down
	doing="start $unit"
	start
	doing="tell how $unit ended"
	tidy
	exec 9>&-
	if [ -n "$job" ]; then
		answer "done 0 started 0 0"
	else
		report
	fi
}

main "$@"
