# Builds the initramfs of kernels anew, from modprobe.d as it is now.
# Arguments: a digest of what modprobe.d held when this was decided (it makes another step of another content), kernels.
main() {
	shift
	command -v update-initramfs >/dev/null || die "there is no update-initramfs: build the initramfs of $* by hand"
	total=$# done=0
	for kernel; do
		[ -e "/boot/vmlinuz-$kernel" ] || stale "kernel $kernel is not installed any more"
	done
	for kernel; do
		progress "$done" "$total"
		update-initramfs -u -k "$kernel" </dev/null || die "update-initramfs -u -k $kernel failed (exit $?)"
		done=$((done + 1))
	done
	# Where Proxmox's own tool keeps kernels on the EFI partitions, it is those that are booted.
	if [ -s /etc/kernel/proxmox-boot-uuids ] && command -v proxmox-boot-tool >/dev/null; then
		proxmox-boot-tool refresh </dev/null || die "proxmox-boot-tool refresh failed (exit $?)"
	fi
	progress "$total" "$total"
}

main "$@"
