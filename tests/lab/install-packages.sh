#!/bin/sh
# Install what the lab needs on a Debian machine. Run as root; does nothing when all of it is there.
set -eu

main() {
    set -- lxc mmdebstrap fuse3 libfuse2 uidmap nftables iproute2 openssh-client shellcheck
    # The tests of the SSH world start an sshd of their own, and log in to these.
    set -- "$@" openssh-server sudo fish tcsh zsh busybox
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
