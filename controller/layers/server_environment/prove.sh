# Runs an environment's kernels on each GPU of a server, and notes what came of it in the environment's marker.
# Arguments: the place, the environment's digest, the loaded driver's version, the host's boot id, the GPUs' UUIDs.
main() {
	place=$1 digest=$2 driver=$3 boot=$4
	shift 4
	enter_place "$place"
	env=/opt/reconcile/env/$digest
	inside 30 "[ -e '$env.json' ]" </dev/null || stale "there is no environment $digest in $(place_name) any more"
	program prove.py | put - 0644 "$env.prove.py" || exit
	inside_job 1500 "'$env/bin/python' -I '$env.prove.py' '$env.json' '$driver' '$boot' $*
rc=\$?
rm -f '$env.prove.py'
exit \$rc" ||
		die "cannot run kernels of environment $digest in $(place_name)"
}

main "$@"
