#!/bin/sh
# Builds the image and runs it: the demo, then the loop. As root, in a mount namespace of its own (test_image.py sees to
# that). Needs no image registry: the base is made by mmdebstrap, and kept.
#   try.sh WORK     WORK is an empty directory for everything that is made
set -eu

work=$1
source=$(cd "$(dirname "$0")/../.." && pwd)
cache=${RECONCILE_IMAGE_CACHE:-/var/cache/reconcile-image}
name=reconcile-image-test

# What can run here is a container without limits of its own, without a cgroup and without systemd around it.
p() { podman --root "$work/root" --runroot "$work/run" --storage-driver overlay --cgroup-manager cgroupfs "$@"; }
limits="--network none --cgroups disabled --ulimit nofile=4096:4096 --ulimit nproc=4096:4096"

said() { printf '== %s s: %s\n' "$(($(date +%s) - begun))" "$1"; }

clean() {
	p rm -f -t 5 "$name" >/dev/null 2>&1 || true
	p unshare true 2>/dev/null || true
	p umount -a >/dev/null 2>&1 || true
}

base() {
	[ -s "$cache/base.tar" ] && return
	mkdir -p "$cache"
	# shellcheck disable=SC2016  # $1 is mmdebstrap's
	mmdebstrap --quiet --format=tar --variant=minbase --include=ca-certificates \
		--dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
		--dpkgopt='path-exclude=/usr/share/locale/*' \
		--customize-hook='rm -rf "$1"/var/lib/apt/lists/*' \
		bookworm "$cache/base.tar.new" http://deb.debian.org/debian
	mv "$cache/base.tar.new" "$cache/base.tar"
}

build() {
	p import --quiet "$cache/base.tar" localhost/base >/dev/null
	# pip reaches packages as it does on this machine
	set -- --volume /etc/ssl/certs:/etc/ssl/certs:ro
	if [ -e /etc/pip.conf ]; then set -- "$@" --volume /etc/pip.conf:/etc/pip.conf:ro; fi
	p build --quiet --layers=false --isolation chroot --network host --format docker \
		--build-arg BASE=localhost/base "$@" --tag localhost/reconcile "$source" >"$work/build.log" 2>&1 ||
		{ cat "$work/build.log" >&2 && exit 1; }
}

demo() {
	mkdir -p "$work/demo"
	cp -r "$source/scripts" "$source/specs" "$work/demo/"
	ln -s /opt/reconcile "$work/demo/.venv"
	chmod -R a+rX "$work" "$work/demo"
	# shellcheck disable=SC2086,SC2016  # a list of options; the shell inside expands the rest
	p run --rm $limits --no-healthcheck --read-only --tmpfs /tmp --volume "$work/demo:/demo:ro" \
		--entrypoint /bin/sh localhost/reconcile -c 'echo "uid $(id -u)"; exec /demo/scripts/demo'
}

loop() {
	# shellcheck disable=SC2086
	p run --detach --name "$name" $limits --health-interval disable --read-only --tmpfs /tmp --cap-drop ALL \
		--volume "$source/specs/demo:/specs:ro" localhost/reconcile \
		run --listen 0.0.0.0:9797 --fleet sim:/specs/fleet.sim.yaml >/dev/null
	waited=0
	until p healthcheck run "$name"; do
		waited=$((waited + 1))
		[ "$waited" -lt 60 ] || { p logs "$name" && exit 1; }
		sleep 1
	done
	said "healthy"
	p stop --time 60 "$name" >/dev/null
	said "the loop ended with $(p inspect --format '{{.State.ExitCode}}' "$name")"
}

begun=$(date +%s)
trap clean EXIT
base
said "base"
build
said "image of $(($(p inspect --format '{{.Size}}' localhost/reconcile) / 1000000)) MB on a base of $(($(p inspect --format '{{.Size}}' localhost/base) / 1000000)) MB"
demo
said "demo"
loop
