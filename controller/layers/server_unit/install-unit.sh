# Writes a server's unit and the files it is made of, and has systemd read it. What runs goes on as it is.
# Arguments: the place, the server's name, the unit's SHA-256 as it was seen (or absent), then for each file its size, its
# mode and its path in the place, in the order in which they follow each other on standard input. The marker comes last:
# until it is there, what is there counts as not written.
main() {
	place=$1 name=$2 seen=$3
	shift 3
	enter_place "$place"
	wait_for_systemd
	unit=/etc/systemd/system/reconcile-$name.service here=/opt/reconcile/server/$name
	write='' move='' secret='' kept=' '
	while [ $# -gt 0 ]; do
		kept="$kept${3##*/} "
		case $3 in */secrets.env | */config.yaml) secret=yes ;; esac
		write="$write
head -c $1 >'$3.reconcile-new' && [ \$(stat -c %s '$3.reconcile-new') = $1 ] && chmod $2 '$3.reconcile-new' &&
	sync '$3.reconcile-new' || fail 'cannot write $3'"
		move="$move
mv -fT '$3.reconcile-new' '$3' || fail 'cannot rename $3 into place'"
		shift 3
	done
	rc=0
	inside 120 "fail() { echo \"\$1\" >&2; exit 1; }
umask 077
was=absent
if [ -e '$unit' ]; then was=\$(sha256sum <'$unit') || fail 'cannot read $unit'; was=\${was%% *}; fi
[ \"\$was\" = '$seen' ] || { echo '$unit has changed since it was read' >&2; exit 75; }
for folder in /opt/reconcile /opt/reconcile/server '$here'; do
	[ ! -L \"\$folder\" ] || fail \"\$folder is a link\"
	[ -d \"\$folder\" ] || mkdir -m 0755 \"\$folder\" 2>/dev/null || mkdir -p \"\$folder\" || fail \"cannot make \$folder\"
done
$write
if [ \"\$was\" != absent ]; then cp -p '$unit' '$here/replaced.service' || fail 'cannot keep the old unit'; fi
rm -f '$here/marker.json'
$move
for file in secrets.env config.yaml; do
	case '$kept' in *\" \$file \"*) ;; *) rm -f '$here'/\$file ;; esac
done
if [ -z '$secret' ]; then
	rm -f '$here/salt'
elif ! [ -s '$here/salt' ]; then
	head -c 32 /dev/urandom | sha256sum | cut -c1-32 >'$here/salt.reconcile-new' && mv -f '$here/salt.reconcile-new' '$here/salt' ||
		fail 'cannot make a salt'
fi
sync '$here' /etc/systemd/system
systemctl daemon-reload || fail 'systemd cannot read its units'
systemctl enable -q 'reconcile-$name.service' || fail 'systemd cannot enable reconcile-$name.service'
state=\$(systemctl show -p LoadState --value 'reconcile-$name.service')
[ \"\$state\" = loaded ] || fail \"systemd does not load reconcile-$name.service: \$state\"" || rc=$?
	case $rc in
	0) ;;
	75) exit 75 ;;
	*) die "the unit of $name was not written in $(place_name) (exit $rc)" ;;
	esac
}

main "$@"
