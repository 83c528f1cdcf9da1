#!/bin/sh
# Install Prometheus and Alertmanager on a Debian machine, for tests that run them by hand. Run as root; does nothing
# when both are there. Their services are neither started nor enabled.
set -eu

main() {
	if [ -x /usr/bin/prometheus ] && [ -x /usr/bin/prometheus-alertmanager ]; then return; fi
	export DEBIAN_FRONTEND=noninteractive
	if [ ! -e /usr/sbin/policy-rc.d ]; then
		trap 'rm -f /usr/sbin/policy-rc.d' EXIT
		printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
		chmod +x /usr/sbin/policy-rc.d
	fi
	apt-get update --quiet
	apt-get install --quiet --yes --no-install-recommends prometheus prometheus-alertmanager
	if command -v systemctl >/dev/null 2>&1; then
		systemctl disable prometheus.service prometheus-alertmanager.service
	fi
}

main "$@"
