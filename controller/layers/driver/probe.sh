# The NVIDIA driver as it is installed: module files by kernel, DKMS, the host's library, installers.
root=${root-}

for image in "$root"/boot/vmlinuz-*; do
	kernel=${image##*/vmlinuz-}
	for module in "$root/lib/modules/$kernel"/updates/dkms/nvidia.ko* "$root/lib/modules/$kernel"/updates/nvidia.ko* \
		"$root/lib/modules/$kernel"/kernel/drivers/video/nvidia.ko* "$root/lib/modules/$kernel"/misc/nvidia.ko*; do
		[ -f "$module" ] || continue
		modinfo "$module" 2>/dev/null | while IFS= read -r line; do
			case $line in
			version:* | license:* | signer:*) printf 'module %s %s\n' "$kernel" "$line" ;;
			esac
		done
		break
	done
done
for version in "$root"/var/lib/dkms/nvidia/[0-9]*; do
	if [ -d "$version" ]; then printf 'dkms %s\n' "${version##*/}"; fi
done
for library in "$root"/usr/lib/*-linux-gnu/libnvidia-ml.so.1 "$root"/usr/lib64/libnvidia-ml.so.1; do
	[ -e "$library" ] && printf 'library %s\n' "$(readlink "$library")"
done

# Installers that we fetched: checked ones have their digest beside them.
for file in "$root"/var/lib/reconcile/drivers/*.run; do
	[ -f "$file.sha256" ] || continue
	read -r digest <"$file.sha256" && printf 'runfile %s %s\n' "$digest" "${file##*/}"
done
if [ -s "$root/var/lib/reconcile/driver-refused" ]; then
	IFS= read -r line <"$root/var/lib/reconcile/driver-refused" && printf 'refused %s\n' "$line"
fi
if [ -s "$root/run/reconcile/driver-stopped" ]; then
	while IFS= read -r line; do printf 'stopped %s\n' "$line"; done <"$root/run/reconcile/driver-stopped"
fi

for module in nvidia nvidia_uvm nvidia_modeset nvidia_drm nvidia_peermem; do
	if [ -d "$root/sys/module/$module" ]; then printf 'loaded %s\n' "$module"; fi
done
