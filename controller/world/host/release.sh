# Gives a lease back, if it is still this controller's.
set -eu

main() {
	run=/run/reconcile
	[ -s "$run/lease" ] || return 0
	exec 9>>"$run/lock"
	flock -w 10 9
	read -r holder rest <"$run/lease"
	if [ "$holder" = "$1" ]; then rm "$run/lease"; fi
}

main "$@"
