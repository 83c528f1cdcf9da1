# Makes the device nodes that are recorded for boot, now. No arguments.
main() {
	[ -r /etc/reconcile/gpus.sh ] || stale "/etc/reconcile/gpus.sh is gone"
	said=$(sh /etc/reconcile/gpus.sh nodes </dev/null 2>&1) || die "$said"
}

main "$@"
