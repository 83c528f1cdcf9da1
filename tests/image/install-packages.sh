#!/bin/sh
# Install what building and running the image needs on a Debian machine. Run as root; does nothing when all of it is
# there. Podman's own services are not enabled.
set -eu

main() {
	set -- podman buildah crun mmdebstrap
	missing=
	for package in "$@"; do
		if [ "$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
			missing="$missing $package"
		fi
	done
	if [ -z "$missing" ]; then return; fi
	export DEBIAN_FRONTEND=noninteractive
	apt-get update --quiet
	# shellcheck disable=SC2086  # a list of names
	apt-get install --quiet --yes --no-install-recommends $missing
	case $missing in
	*podman*)
		if command -v systemctl >/dev/null 2>&1; then
			systemctl disable podman.socket podman.service podman-restart.service \
				podman-auto-update.service podman-auto-update.timer
		fi
		;;
	esac
}

main "$@"
