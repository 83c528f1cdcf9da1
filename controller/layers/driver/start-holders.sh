# Starts services that were stopped for the driver's sake and never started again.
# Arguments: "service NAME" for each.
main() {
	for each; do
		systemctl start "${each#service }.service" </dev/null || die "cannot start ${each#service }"
	done
	rm -f /run/reconcile/driver-stopped
}

main "$@"
