# Installs a driver for kernels, and loads nothing. What is loaded stays.
# Arguments: runfile | apt, version, open | proprietary, the installer's name, its SHA-256, kernels (the running one first).
main() {
	source=$1 version=$2 flavour=$3 name=$4 sha256=$5
	shift 5
	total=$(($# + 2)) done=0
	progress 0 "$total"
	for kernel; do
		[ -e "/lib/modules/$kernel/build/Makefile" ] || stale "kernel $kernel has no headers"
	done
	"from_$source"
	progress $((done += 1)) "$total"
	for kernel; do
		if ! is_there "$kernel"; then
			dkms install "nvidia/$version" -k "$kernel" </dev/null || die "DKMS cannot build $version for kernel $kernel: $(why)"
		fi
		is_there "$kernel" || die "kernel $kernel still has $(module_of "$kernel"), not $version ($flavour)"
		progress $((done += 1)) "$total"
	done
	library=$(readlink -f /usr/lib/*-linux-gnu/libnvidia-ml.so.1 | head -n 1)
	[ "${library##*.so.}" = "$version" ] || die "the library is ${library:-missing}, not of $version"
	progress "$total" "$total"
}

from_runfile() {
	file=$RECONCILE_STATE/drivers/$name
	[ -f "$file" ] || stale "$file is not there any more"
	[ -z "$sha256" ] || [ "$(digest "$file")" = "$sha256" ] || stale "$file has changed since it was checked"
	run_installer "$file" "$flavour" || die "the installer failed: $(tail -n 4 /var/log/nvidia-installer.log | tr '\n' ' ')"
}

# run_installer FILE FLAVOUR: with DKMS, silently; nouveau may still be bound elsewhere, and a driver may be loaded.
run_installer() {
	sh "$1" --advanced-options </dev/null >"$RECONCILE_STEP_DIR/options" 2>&1 || :
	set -- "$1" "$2" --silent --dkms --no-x-check --no-nouveau-check
	if grep -q -- '--kernel-module-type' "$RECONCILE_STEP_DIR/options"; then
		set -- "$@" "--kernel-module-type=$2"
	elif [ "$2" = open ]; then
		set -- "$@" --kernel-module-build-directory=kernel-open
	fi
	for option in --skip-module-load --allow-installation-with-running-driver; do
		if grep -q -- "$option" "$RECONCILE_STEP_DIR/options"; then set -- "$@" "$option"; fi
	done
	runfile=$1
	shift 2
	printf '%s %s\n' "$runfile" "$*"
	sh "$runfile" "$@" </dev/null
}

# The names are those of NVIDIA's repository, and, where it is not used, of Debian's.
from_apt() {
	case $flavour in
	open) modules='nvidia-kernel-open-dkms nvidia-open-kernel-dkms' ;;
	*) modules='nvidia-kernel-dkms' ;;
	esac
	programs='nvidia-driver-cuda nvidia-smi'
	apt-get update </dev/null || printf 'apt-get update: exit %d\n' "$?"
	module=$(first_with_version "$modules")
	program=$(first_with_version "$programs")
	case $module:$program in
	:* | *:) die "no repository has $version of one of: $modules, and of one of: $programs" ;;
	esac
	DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends --allow-downgrades \
		-o Dpkg::Options::=--force-confold -o DPkg::Lock::Timeout=300 "$module" "$program" </dev/null ||
		die "apt-get install $module $program failed (exit $?)"
}

# first_with_version NAMES: the first package that there is of the wanted version, as NAME=VERSION.
first_with_version() {
	for package in $1; do
		found=$(apt-cache madison "$package" </dev/null 2>/dev/null | while read -r _ _ each _; do
			case $each in
			"$version"-* | "$version" | *":$version-"*)
				printf '%s\n' "$each"
				break
				;;
			esac
		done)
		if [ -n "$found" ]; then
			printf '%s=%s\n' "$package" "$found"
			return
		fi
	done
}

# module_of KERNEL: version and flavour of the module that it would load.
module_of() {
	modinfo -k "$1" nvidia 2>/dev/null | (
		found='' licence=''
		while read -r key value; do
			case $key in
			version:) found=$value ;;
			license:) licence=$value ;;
			esac
		done
		case $found:$licence in
		:*) printf 'none\n' ;;
		*:NVIDIA) printf '%s (proprietary)\n' "$found" ;;
		*) printf '%s (open)\n' "$found" ;;
		esac
	)
}

is_there() {
	[ "$(module_of "$1")" = "$version ($flavour)" ]
}

why() {
	tail -n 5 "/var/lib/dkms/nvidia/$version/build/make.log" 2>/dev/null | tr '\n' ' '
}

main "$@"
