# Puts a new config in the place of a container's, if it is still the one that was read.
# Arguments: the container's id, the SHA-256 of the file that was read, the lines in it that pass devices.
# Standard input: the new file.
main() {
	id=$1 seen=$2 device_lines=$3
	conf=/etc/pve/lxc/$id.conf
	[ -f "$conf" ] || stale "CT $id is not on this node"
	with_pve_lock "$id" put
}

put() {
	[ "$(digest "$conf")" = "$seen" ] || stale "$conf has changed since it was read"
	remember
	replace "$conf" "$seen"
}

# What a running container was started with can no longer be told from its config after an edit. The record is there
# before the edit, and stays that of the first edit since the start.
remember() {
	record=/run/reconcile/edited/$id
	if ! runs; then
		rm -f "$record"
		return
	fi
	if [ -f "$record" ] && read -r at <"$record" && [ "$at" -ge "$(started)" ]; then return; fi
	read -r now _ </proc/uptime
	mkdir -p /run/reconcile/edited
	printf '%s\n%s\n' "${now%.*}${now#*.}" "$device_lines" >"$record.new"
	mv -f "$record.new" "$record"
}

main "$@"
