# rbd_status STORAGE IMAGE COMMAND...: asks Ceph who watches an image of a storage, as JSON, by way of COMMAND (which
# bounds its time), with the options that Proxmox calls rbd with (PVE/Storage/RBDPlugin.pm, PVE/CephConfig.pm).
# Returns 2, and asks nothing, when the storage is no RBD storage.
rbd_status() {
	_storage=$1 _image=$2
	shift 2
	_in='' _pool='' _namespace='' _monitors='' _user=admin
	while read -r _key _value; do
		case $_key in
		*:) _in='' && if [ "$_key $_value" = "rbd: $_storage" ]; then _in=1 _pool=rbd; fi ;;
		pool) [ -z "$_in" ] || _pool=$_value ;;
		namespace) [ -z "$_in" ] || _namespace=$_value ;;
		monhost) [ -z "$_in" ] || _monitors=$_value ;;
		username) [ -z "$_in" ] || _user=$_value ;;
		esac
	done <"${root-}/etc/pve/storage.cfg"
	[ -n "$_pool" ] || return 2
	_files=${root-}/etc/pve/priv/ceph/$_storage
	set -- "$@" rbd -p "$_pool"
	[ -z "$_namespace" ] || set -- "$@" --namespace "$_namespace"
	if [ -n "$_monitors" ]; then
		while :; do
			case $_monitors in
			*[\ \;]*) _monitors=${_monitors%%[ ;]*},${_monitors#*[ ;]} ;;
			*) break ;;
			esac
		done
		set -- "$@" -m "$_monitors"
		[ ! -f "$_files.conf" ] || set -- "$@" -c "$_files.conf"
	fi
	[ ! -f "$_files.keyring" ] || set -- "$@" --keyring "$_files.keyring"
	"$@" -n "client.$_user" status --format json "$_image"
}
