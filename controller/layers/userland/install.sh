# Installs NVIDIA's libraries and programs in a running container, of the host's module's version, without modules.
# Arguments: the container's id, the version, runfile | apt, the installer's name in our directory, its SHA-256.
main() {
	id=$1 version=$2 source=$3 name=$4 sha256=$5
	[ "$(cat /sys/module/nvidia/version 2>/dev/null)" = "$version" ] || stale "the loaded driver is not $version any more"
	runs || stale "CT $id does not run"
	progress 0 3
	"from_$source"
	progress 2 3
	# pct's exit codes and the command's are the same numbers: only what the command prints tells whose it was.
	told=$(within 60 'readlink -f /usr/lib/*-linux-gnu/libnvidia-ml.so.1 /usr/lib64/libnvidia-ml.so.1 2>/dev/null | head -n 1; timeout 30 nvidia-smi -L 2>&1; echo "nvidia-smi: exit $?"')
	printf '%s\n' "$told"
	case $told in
	*"libnvidia-ml.so.$version"*) ;;
	*) die "CT $id still has other libraries: $(printf '%s' "$told" | head -n 1)" ;;
	esac
	progress 3 3
}

# within SECONDS COMMAND: runs a shell's command in the container.
within() {
	timeout "$1" pct exec "$id" -- sh -c "$2" </dev/null
}

from_runfile() {
	file=$RECONCILE_STATE/drivers/$name
	[ -f "$file" ] || stale "$file is not there any more"
	[ "$(digest "$file")" = "$sha256" ] || stale "$file has changed since it was checked"
	place=/var/tmp/reconcile-$name
	pct push "$id" "$file" "$place" --perms 0700 </dev/null || die "cannot copy the installer into CT $id"
	progress 1 3
	said=$(within 1500 "sh $place --silent --no-kernel-modules --no-x-check --no-nouveau-check; echo installer: exit \$?; rm -f $place") || :
	printf '%s\n' "$said"
	case $said in
	*"installer: exit 0"*) return ;;
	esac
	die "the installer failed in CT $id: $(within 30 'tail -n 4 /var/log/nvidia-installer.log' | tr '\n' ' ')"
}

from_apt() {
	said=$(within 1500 "export DEBIAN_FRONTEND=noninteractive; apt-get update; for p in nvidia-driver-cuda nvidia-utils-${version%%.*} nvidia-smi; do
		v=\$(apt-cache madison \$p | tr -d ' ' | cut -d'|' -f2 | grep -m1 -E '^([0-9]+:)?$version(-|\$)') || continue
		apt-get install -y --no-install-recommends --allow-downgrades \$p=\$v && echo installer: exit 0
		break
	done") || :
	printf '%s\n' "$said"
	case $said in
	*"installer: exit 0"*) ;;
	*) die "no package of driver $version could be installed in CT $id" ;;
	esac
}

main "$@"
