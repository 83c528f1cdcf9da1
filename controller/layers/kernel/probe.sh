# Which kernels are installed, which boots next, which have headers; what keeps nouveau off; what is in each initramfs.
root=${root-}

# first FILE: its first line, or nothing.
first() {
	line=''
	if [ -r "$1" ]; then IFS= read -r line <"$1" || :; fi
	printf '%s' "$line"
}

running=$(first "$root/proc/sys/kernel/osrelease")
printf 'running %s\n' "$running"
printf 'next-boot-pin %s\npin %s\n' "$(first "$root/etc/kernel/next-boot-pin")" "$(first "$root/etc/kernel/proxmox-boot-pin")"
lacking='' images=''
for image in "$root"/boot/vmlinuz-*; do
	[ -e "$image" ] || continue
	kernel=${image##*/vmlinuz-}
	printf 'installed %s\n' "$kernel"
	if [ ! -e "$root/lib/modules/$kernel/build/Makefile" ]; then lacking="$lacking $kernel"; fi
	if [ -e "$root/boot/initrd.img-$kernel" ]; then images="$images $root/boot/initrd.img-$kernel"; fi
done
for modules in "$root"/lib/modules/*; do
	if [ -e "$modules/build/Makefile" ]; then printf 'headers %s\n' "${modules##*/}"; fi
done
if [ -d "$root/sys/module/nouveau" ]; then echo loaded nouveau; fi
if [ -s "$root/etc/kernel/proxmox-boot-uuids" ]; then echo boot-tool; fi
dkms=
if [ -x "$root/usr/sbin/dkms" ]; then dkms=yes; fi
[ -z "$dkms" ] || echo dkms

# The firmware's variable: four bytes of attributes, and then whether secure boot is on.
variable=$root/sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c
if [ ! -d "$root/sys/firmware/efi" ]; then
	echo secure-boot 0
elif [ -r "$variable" ]; then
	on=$(od -An -tu1 -j4 -N1 "$variable" | tr -d ' ')
	printf 'secure-boot %s\n' "$on"
	# DKMS signs with a key of its own; it counts when a person has enrolled it at the console.
	if [ "$on" = 1 ] && command -v mokutil >/dev/null 2>&1; then
		case $(mokutil --test-key "$root/var/lib/dkms/mok.pub" 2>/dev/null) in
		*'already enrolled'*) echo dkms-key ;;
		esac
		mokutil --list-enrolled 2>/dev/null | sed -n 's/^ *Subject:.*CN *= *\([^,]*\).*/enrolled \1/p'
	fi
fi

# What apt could install of what is lacking, by what it knows without asking anybody.
if [ -n "$lacking" ] || [ -z "$dkms" ]; then
	if command -v apt-cache >/dev/null 2>&1; then
		# Looked up by hand on purpose: its age is what counts, in whole days.
		if [ -n "$(find "$root/var/lib/apt/lists" "$root/var/lib/reconcile/apt-updated" -maxdepth 0 -mmin -1440 2>/dev/null)" ]; then
			echo lists fresh
		else
			echo lists old
		fi
		set -- dkms
		for kernel in $lacking; do
			series=${kernel%%-*}
			set -- "$@" "proxmox-headers-$kernel" "pve-headers-$kernel" "linux-headers-$kernel" "proxmox-headers-${series%.*}"
		done
		printf '==packages\n'
		detached apt-headers 6 apt-cache policy "$@" proxmox-default-headers pve-headers linux-headers-amd64 linux-headers-arm64
	fi
fi

printf '==modprobe\n'
files "$root"/etc/modprobe.d/*.conf "$root"/run/modprobe.d/*.conf "$root"/usr/local/lib/modprobe.d/*.conf \
	"$root"/usr/lib/modprobe.d/*.conf "$root"/lib/modprobe.d/*.conf

# What an initramfs holds is looked up once for each that is built: it takes a second or two.
# shellcheck disable=SC2016 # run by a shell of its own
within='set -eu
image=$1
# tail and head before a pipe that closes early are no failure
at() { tail -c "+$(($1 + 1))" "$image" 2>/dev/null || :; }
size=$(stat -L -c %s "$image")
work=$(mktemp -d /tmp/reconcile-initramfs.XXXXXX)
trap "rm -rf $work $work.names" EXIT
: >"$work.names"
# names and confs: module files by name alone, for they are large; configuration with what it says
names() { cpio -it --quiet "*/nouveau.ko*" "*/nvidia*.ko*" "*/vfio*.ko*" 2>/dev/null; }
confs() {
	(cd "$work" && cpio -id --quiet --no-absolute-filenames "etc/modprobe.d/*" "lib/modprobe.d/*" "usr/lib/modprobe.d/*" \
		"conf/modules" 2>/dev/null)
}
offset=0
while [ "$offset" -lt "$size" ]; do
	case $(at "$offset" | head -c 6 | od -An -tx1 | tr -d " \n") in
	30373037303[12])
		blocks=$(at "$offset" | cpio -it 2>&1 >/dev/null | tail -n 1)
		at "$offset" | names >>"$work.names"
		at "$offset" | confs
		offset=$((offset + ${blocks%% *} * 512))
		continue ;;
	1f8b*) tool=gzip ;;
	28b52ffd*) tool=zstd ;;
	fd377a585a00) tool=xz ;;
	02214c18*) tool=lz4 ;;
	425a68*) tool=bzip2 ;;
	00000000*) offset=$((offset + 4)); continue ;;
	*) echo "packed in an unknown way" >&2; exit 1 ;;
	esac
	command -v "$tool" >/dev/null || { echo "there is no $tool to unpack it with" >&2; exit 1; }
	at "$offset" | "$tool" -dc 2>/dev/null | names >>"$work.names"
	at "$offset" | "$tool" -dc 2>/dev/null | confs
	break
done
sed "s|^\./||; s|^|module |" "$work.names" | sort
cd "$work"
find . -type f | sort | sed "s|^\./||" | while read -r file; do
	grep -aH "" -- "$file" | sed "s/^/line /" || :
done'
[ -n "$images" ] || return 0
wait_for=6 # of all of them: what is not read by then is read on, and known at a later look
# shellcheck disable=SC2086 # paths without spaces
stat -L -c '%Y-%s %n' $images | while read -r stamp image; do
	kernel=${image##*/initrd.img-}
	name=initrd-$kernel-$stamp
	printf '==initramfs %s\n' "$kernel"
	for old in "$run_dir/tool.initrd-$kernel-"*; do
		case $old in "$run_dir/tool.$name".*) ;; *) rm -f "$old" ;; esac
	done
	if [ -f "$run_dir/tool.$name.done" ]; then
		cat "$run_dir/tool.$name.done"
	else
		said=$(detached "$name" "$wait_for" sh -c "$within" sh "$image")
		printf '%s\n' "$said"
		case $said in hung*) wait_for=1 ;; esac
	fi
done
