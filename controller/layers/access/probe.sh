# Who answers, on which kernel, and what the cluster file system says of the cluster.
root=${root-}
printf 'uid %s\n%s\n' "$uid" "$kernel"
read -r name <"$root/proc/sys/kernel/hostname" && printf 'hostname %s\n' "$name"
for tool in systemd-run flock setsid timeout sha256sum; do
	command -v "$tool" >/dev/null 2>&1 || printf 'missing %s\n' "$tool"
done
if [ -d "$root/etc/pve/nodes" ] || [ -f "$root/etc/pve/.members" ]; then
	printf '==members\n'
	cat "$root/etc/pve/.members" - "$root/etc/pve/.vmlist" <<-END

		==vmlist
	END
	printf '\n==ha\n'
	if [ -f "$root/etc/pve/ha/resources.cfg" ]; then cat "$root/etc/pve/ha/resources.cfg"; fi
fi
