# What every action script has at hand; put before it when it is laid down on a host.
# RECONCILE_STATE, RECONCILE_STEP_DIR, RECONCILE_STEP, RECONCILE_OBJECT and RECONCILE_GENERATION are set.
# Scripts run under `set -eu`. Names that begin with _ are this file's own.

# stale MESSAGE: what the step was decided on is no longer so; nothing was done. Look again.
stale() {
	printf '%s\n' "$*" >&2
	exit 75
}

# die MESSAGE: the step has failed.
die() {
	printf '%s\n' "$*" >&2
	exit 1
}

# digest FILE: its sha256, or "absent".
digest() {
	if [ ! -e "$1" ]; then
		printf 'absent\n'
		return
	fi
	_digest=$(sha256sum <"$1") || die "cannot read $1"
	printf '%s\n' "${_digest%% *}"
}

# keep FILE: keeps a copy of a file that is about to be replaced, the newest ten of each file, each with a marker
# that says whose step it was. The copy is there before the original goes, or the step fails.
keep() {
	_kept_for=$RECONCILE_STATE/kept$1
	_kept_n=0
	_kept=$(printf '%s@%010d-%02d' "$_kept_for" "$RECONCILE_GENERATION" "$_kept_n")
	while [ -e "$_kept" ]; do
		_kept_n=$((_kept_n + 1))
		_kept=$(printf '%s@%010d-%02d' "$_kept_for" "$RECONCILE_GENERATION" "$_kept_n")
	done
	(
		umask 077
		mkdir -p "${_kept%/*}" &&
			cat <"$1" >"$_kept.part" &&
			printf 'schema 1\nobject %s\nstep %s\nfile %s\nsha256 %s\nmode %s\nat %s\n' \
				"$RECONCILE_OBJECT" "$RECONCILE_STEP" "$1" "$(digest "$_kept.part")" \
				"$(stat -c '%a %u:%g' "$1")" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" >"$_kept.marker" &&
			sync "$_kept.part" "$_kept.marker" &&
			mv -f "$_kept.part" "$_kept"
	) || die "cannot keep a copy of $1"
	set -- "$_kept_for"@[0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9][0-9]-[0-9][0-9]
	while [ $# -gt 10 ]; do
		rm -f "$1" "$1.marker"
		shift
	done
}

# replace FILE SHA256 <NEW: puts NEW in the place of FILE, in one rename, if FILE still has that digest ("absent" for
# one that must not be there yet); else stale. Mode and owner stay, and the old content is kept. A file system that
# fixes modes and owners itself (pmxcfs) is never asked to change them.
replace() {
	_target=$(readlink -f -- "$1") || die "there is no directory for $1"
	_part=$_target.reconcile-tmp
	_was=$(digest "$_target") || exit
	[ "$_was" = "$2" ] || stale "$1 has changed since it was read"
	(
		umask 077
		if [ "$2" = absent ]; then umask 022; fi
		cat >"$_part"
	) || _abandon "cannot write beside $1"
	if [ "$(digest "$_part")" = "$2" ]; then
		rm -f "$_part"
		return
	fi
	if [ "$2" != absent ]; then
		keep "$_target"
		_same=$(stat -c '%u:%g %a' "$_target") || _abandon "cannot read the mode of $1"
		if [ "$(stat -c '%u:%g %a' "$_part")" != "$_same" ]; then
			chown "${_same% *}" "$_part" || _abandon "cannot give the new $1 its owner"
			chmod "${_same#* }" "$_part" || _abandon "cannot give the new $1 its mode"
		fi
	fi
	sync "$_part" || _abandon "cannot write the new $1 to disk"
	_was=$(digest "$_target") || exit
	if [ "$_was" != "$2" ]; then
		rm -f "$_part"
		stale "$1 has changed since it was read"
	fi
	if [ "$2" = absent ]; then
		mv -n "$_part" "$_target" || _abandon "cannot rename the new $1 into place"
		if [ -e "$_part" ]; then
			rm -f "$_part"
			stale "$1 is there now"
		fi
	else
		mv -f "$_part" "$_target" || _abandon "cannot rename the new $1 into place"
	fi
	sync "${_target%/*}" || die "cannot write ${_target%/*} to disk"
}

_abandon() {
	rm -f "$_part"
	die "$@"
}

# with_pve_lock ID COMMAND...: runs a function or command under PVE's own lock of a guest's configuration (its path,
# and 10 s of waiting, are those of PVE::AbstractConfig). Not for pct or qm: they take the lock themselves.
with_pve_lock() {
	mkdir -p /run/lock/lxc
	exec 9>>"/run/lock/lxc/pve-config-$1.lock"
	flock -w 10 9 || stale "the configuration of $1 has been locked by another for 10 s"
	shift
	"$@"
	_locked_rc=$?
	exec 9>&-
	return "$_locked_rc"
}

# progress DONE TOTAL: how far a job is, in one unit (bytes, files); TOTAL is 0 while it is not known.
progress() {
	read -r _now _ </proc/uptime
	if [ -s "$RECONCILE_STEP_DIR/progress" ]; then
		read -r _done _ _since <"$RECONCILE_STEP_DIR/progress"
		if [ "$_done" = "$1" ]; then _now=$_since; fi
	fi
	printf '%d %d %s\n' "$1" "$2" "$_now" >"$RECONCILE_STEP_DIR/progress.new"
	mv -f "$RECONCILE_STEP_DIR/progress.new" "$RECONCILE_STEP_DIR/progress"
}
