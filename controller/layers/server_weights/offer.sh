# Offers a model's files of a place to who holds a token; the place that wants them made it, and only its digest is known.
# Arguments: the place, the model's key, its directory, the SHA-256 of the token. On standard input: the files, JSON.
main() {
	place=$1 key=$2 directory=$3 digest=$4
	enter_place "$place"
	command -v python3 >/dev/null || die "there is no python3 on this host to offer files with"
	pid=-
	if [ "$place" != - ]; then
		pid=$(lxc-info -n "$place" -p -H </dev/null) || stale "CT $place does not run"
	fi
	offers=/run/reconcile/offers
	(umask 077 && mkdir -p "$offers")
	program offer.py >"$RECONCILE_STEP_DIR/offer.py"
	python3 -I "$RECONCILE_STEP_DIR/offer.py" "$pid" "$directory" "$digest" "$offers/$key" || die "the offer has ended"
}

main "$@"
