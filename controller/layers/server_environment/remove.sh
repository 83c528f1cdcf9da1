# Removes an environment that nothing uses any more, or what a build left.
# Arguments: the place, the environment's digest, whose it has to be ("": it has no marker).
main() {
	place=$1 digest=$2 object=$3
	enter_place "$place"
	env=/opt/reconcile/env/$digest
	if [ -n "$object" ]; then
		inside 30 "grep -q '\"object\": \"$object\"' '$env.json'" </dev/null || stale "environment $digest is another's"
	else
		inside 30 "[ ! -e '$env.json' ]" </dev/null || stale "environment $digest is finished now"
	fi
	# What runs from it has its path among its arguments or its mapped files; the pattern is in no argument itself.
	users=$(inside 120 "printf '%s' '/env/$digest' | sed 's,^,/opt/reconcile,' >/run/reconcile-env-$digest
grep -lsF -f /run/reconcile-env-$digest /proc/[0-9]*/maps /proc/[0-9]*/cmdline /etc/systemd/system/reconcile-*.service \\
	/opt/reconcile/server/*/args.json /opt/reconcile/server/*/good/args.json
rm -f /run/reconcile-env-$digest" </dev/null) || :
	[ -z "$users" ] || stale "environment $digest is in use: $(printf '%s' "$users" | head -n 3 | tr '\n' ' ')"
	# The marker goes last: what is cut off is seen as ours and gone on with.
	inside 1800 "rm -rf '$env' '$env.build' && rm -f '$env.json' '$env.prove.py'
ls -d /opt/reconcile/env/*.build >/dev/null 2>&1 || rm -rf /opt/reconcile/uv/cache" </dev/null ||
		die "cannot remove environment $digest in $(place_name)"
}

main "$@"
