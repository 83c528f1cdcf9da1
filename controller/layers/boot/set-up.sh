# Lays down what binds the cards at boot: the unit, its script, its data; and has systemd start the unit.
# Arguments: of each of the three (unit, script, data) the SHA-256 of what was read ("absent") and the size of the new.
# Standard input: the three new files, one after the other.
main() {
	unit=/etc/systemd/system/reconcile-gpus.service
	mkdir -p /etc/reconcile
	put "$unit" "$1" "$2"
	put /etc/reconcile/gpus.sh "$3" "$4"
	put /etc/reconcile/gpus "$5" "$6"
	systemctl daemon-reload </dev/null || die "systemd does not read its units anew"
	systemctl -q enable reconcile-gpus.service </dev/null || die "the unit cannot be enabled"
}

# put FILE SEEN SIZE <NEW: the next SIZE bytes of standard input in the place of FILE. One that a run that was cut off
# has put there already stays.
put() {
	head -c "$3" >"$RECONCILE_STEP_DIR/new"
	[ "$(stat -c %s "$RECONCILE_STEP_DIR/new")" = "$3" ] || die "not all of the new $1 has come"
	if [ "$(digest "$1")" = "$(digest "$RECONCILE_STEP_DIR/new")" ]; then return; fi
	replace "$1" "$2" <"$RECONCILE_STEP_DIR/new"
}

main "$@"
