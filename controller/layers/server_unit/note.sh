# What a server's unit runs before each start and after each end, so that a look from outside knows of it.
# Arguments: start NAME DIGEST | end NAME
set -u
main() {
	umask 077
	run=/run/reconcile-server
	mkdir -p "$run"
	now=$(date +%s)
	case $1 in
	start)
		here=/opt/reconcile/server/$2 secrets=-
		if [ -f "$here/salt" ]; then
			# What a look computes of the same files (probe.sh)
			secrets=$(cat "$here/salt" "$here/secrets.env" "$here/config.yaml" 2>/dev/null | sha256sum)
			secrets=${secrets%% *}
		fi
		printf '%s %s %s\n' "$3" "$now" "$secrets" >"$run/$2.started.new" && mv -f "$run/$2.started.new" "$run/$2.started"
		;;
	end)
		# systemd tells what it saw (systemd.exec(5), ExecStopPost)
		{
			if [ -f "$run/$2.ends" ]; then tail -n 19 "$run/$2.ends"; fi
			printf '%s %s %s %s\n' "$now" "${SERVICE_RESULT:-unknown}" "${EXIT_CODE:-unknown}" "${EXIT_STATUS:-unknown}"
		} >"$run/$2.ends.new" && mv -f "$run/$2.ends.new" "$run/$2.ends"
		if [ "${SERVICE_RESULT:-success}" != success ] && command -v journalctl >/dev/null; then
			# Engines print their arguments, some with their key among them.
			journalctl -q "_SYSTEMD_INVOCATION_ID=${INVOCATION_ID:-none}" -n 300 -o cat --no-pager 2>/dev/null |
				grep -avi 'api_key\|api-key\|token=' | cut -c1-1000 | tail -n 200 >"/opt/reconcile/server/$2/crash.log"
		fi
		;;
	esac
	return 0
}

main "$@"
