# What binds the cards at boot: our unit, its script and its data, whether systemd starts it; modules loaded by name.
root=${root-}
unit=$root/etc/systemd/system/reconcile-gpus.service
if [ -L "$root/etc/systemd/system/sysinit.target.wants/reconcile-gpus.service" ]; then echo enabled; fi
if [ -L "$unit" ]; then echo masked; fi
echo '==files'
files "$unit" "$root/etc/reconcile/gpus.sh" "$root/etc/reconcile/gpus" "$root/etc/modules" "$root"/etc/modules-load.d/*.conf \
	"$root"/usr/lib/modules-load.d/*.conf
