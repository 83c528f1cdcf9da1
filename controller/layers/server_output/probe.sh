# What the servers of each place answered when they were asked last, and what is remembered of them.
root=${root-}

output() {
	plain /opt/reconcile/server || return 0
	for path in "$inside"/opt/reconcile/server/*; do
		name=${path##*/} here=/opt/reconcile/server/${path##*/}
		case $name in '' | *[!a-z0-9._-]*) continue ;; esac
		want "$here/state.json" "$here/checks/output.json"
	done
}

places output || return 1
wanted
