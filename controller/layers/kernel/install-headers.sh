# Installs the headers of kernels, what brings them for kernels to come, and DKMS.
# Arguments: fresh | old (apt's lists), and the kernels that have none.
main() {
	lists=$1
	shift
	export DEBIAN_FRONTEND=noninteractive
	command -v apt-get >/dev/null || die "there is no apt-get: install headers of kernel $* and dkms by hand"
	total=$(($# + 2)) done=0
	progress 0 "$total"
	if [ "$lists" = old ] || ! all_known "$@"; then
		# A repository that does not answer (one that wants a subscription) is no harm if another has what is needed.
		apt-get update </dev/null || printf 'apt-get update: exit %d\n' "$?"
		date >"$RECONCILE_STATE/apt-updated"
	fi
	progress $((done += 1)) "$total"
	all_known "$@" || die "no repository has $lacking"
	packages=dkms
	for kernel; do
		packages="$packages $(package_of "$kernel")"
	done
	# shellcheck disable=SC2086 # names of packages
	install $packages
	for kernel; do
		[ -e "/lib/modules/$kernel/build/Makefile" ] || die "kernel $kernel still has no headers after $packages was installed"
		progress $((done += 1)) "$total"
	done
	for_kernels_to_come
	progress "$total" "$total"
}

install() {
	apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-confold -o DPkg::Lock::Timeout=300 "$@" </dev/null ||
		die "apt-get install $* failed (exit $?)"
}

# all_known KERNEL...: whether there are packages for all of it; `lacking` names what there is none for.
all_known() {
	lacking=
	for kernel; do
		[ -n "$(package_of "$kernel")" ] || lacking="$lacking headers of kernel $kernel"
	done
	known dkms || lacking="$lacking dkms"
	[ -z "$lacking" ]
}

package_of() {
	for name in "proxmox-headers-$1" "pve-headers-$1" "linux-headers-$1"; do
		if known "$name"; then
			printf '%s\n' "$name"
			return
		fi
	done
}

# known PACKAGE: whether apt has a version of it to install.
known() {
	apt-cache policy "$1" </dev/null 2>/dev/null | grep -q '^  Candidate: [^(]'
}

# Without it the next kernel that is installed has no headers, and DKMS skips it.
for_kernels_to_come() {
	series=$(uname -r)
	series=${series%%-*}
	for name in proxmox-default-headers "proxmox-headers-${series%.*}" pve-headers "linux-headers-$(dpkg --print-architecture)"; do
		case $name:$(uname -r) in
		linux-*:*-pve) continue ;;
		linux-*) ;;
		*:*-pve) ;;
		*) continue ;;
		esac
		if known "$name"; then
			install "$name"
			return
		fi
	done
	printf 'no package brings headers for kernels to come\n'
}

main "$@"
