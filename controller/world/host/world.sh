# What is at work on a host, and who may start more: generation, boot, lease, the last step, the jobs. The section
# `world`; controller/facts/units.py reads it. Builtins only, but for one `tail` for each job that has not ended well.
# Times are seconds since the host's boot, so the answer stays the same while nothing changes.
state=${root-}/var/lib/reconcile
run=${root-}/run/reconcile
units=${root-}/run/systemd/transient

if [ -e "$state" ] && [ ! -r "$state" ]; then
	printf 'cannot read %s\n' "$state" >&2
	return 1
fi
schema=1 generation=0 last=0
if [ -s "$state/schema" ]; then read -r schema <"$state/schema"; fi
if [ -s "$state/generation" ]; then read -r generation last <"$state/generation"; fi
read -r boot <"${root-}/proc/sys/kernel/random/boot_id"
read -r now rest <"${root-}/proc/uptime"
now=${now%.*}
printf 'schema %s\ngeneration %s\nboot %s\n' "$schema" "$generation" "$boot"

if [ -s "$run/lease" ]; then
	{
		read -r holder until
		read -r name
	} <"$run/lease"
	if [ "$until" -gt "$now" ]; then printf 'lease %s %s %s\n' "$holder" "$until" "$name"; fi
fi

# Sets how, rc, began, ended, and step and object, of the unit $1 with directory $2; "-" is what there is not.
told() {
	step=- object=- unit_boot=- began=- rc=- how=- ended=-
	if [ -s "$2/meta" ]; then read -r step object unit_boot <"$2/meta"; fi
	if [ -s "$2/began" ]; then read -r began <"$2/began"; fi
	if [ -e "$units/$1.service" ]; then how=running; fi
	# Looked at after the unit: it writes its result before it goes.
	if [ -s "$2/rc" ]; then
		read -r rc how ended <"$2/rc"
	elif [ "$how" != running ]; then
		if [ "$began" = - ]; then
			how=never-begun
		elif [ "$unit_boot" != "$boot" ]; then
			how=interrupted
		else
			how=vanished
		fi
	fi
	# Seconds since an earlier boot mean nothing now.
	if [ "$unit_boot" != "$boot" ]; then began=- ended=-; fi
}

if [ -e "$state/steps/$last/meta" ]; then
	told reconcile-step "$state/steps/$last"
	printf 'step %s %s %s %s %s %s %s\n' "$last" "$how" "$rc" "$began" "$ended" "$step" "$object"
fi

for dir in "$state"/jobs/*; do
	[ -e "$dir/meta" ] || continue
	job=${dir##*/}
	told "reconcile-job-$job" "$dir"
	reached=- total=- since=-
	if [ -s "$dir/progress" ]; then
		read -r reached total since <"$dir/progress"
		if [ "$how" = running ] && [ "$((now - ${since%.*}))" -ge 180 ]; then how=stalled; fi
		if [ "$unit_boot" != "$boot" ]; then since=-; fi
	fi
	log=
	if [ "$rc" != 0 ] && [ -s "$dir/out" ]; then log=$(tail -c 4096 "$dir/out"); fi
	printf 'job %s %s %s %s %s %s %s\n' "$job" "$how" "$rc" "$began" "$ended" "$step" "$object"
	if [ "$reached" != - ]; then printf 'progress %s %s %s\n' "$reached" "$total" "$since"; fi
	if [ -n "$log" ]; then printf 'log %d\n%s\n' "${#log}" "$log"; fi
done
printf 'end\n'
