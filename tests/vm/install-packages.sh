#!/bin/sh
# Install what the virtual machine needs on a Debian machine. Run as root; does nothing when all of it is there.
set -eu

main() {
    set -- qemu-system-x86 mmdebstrap e2fsprogs openssh-client
    missing=
    for package in "$@"; do
        if [ "$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
            missing="$missing $package"
        fi
    done
    if [ -n "$missing" ]; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update --quiet
        # shellcheck disable=SC2086  # a list of names
        apt-get install --quiet --yes --no-install-recommends $missing
    fi
}

main "$@"
