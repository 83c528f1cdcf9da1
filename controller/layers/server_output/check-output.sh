# Asks a server what it has to know, and leaves what it answered in its folder. Long work; takes nothing from anybody.
# Arguments: the place, the server's name, the Python of its environment.
main() {
	place=$1 name=$2 python=$3
	enter_place "$place"
	here=/opt/reconcile/server/$name
	rc=0
	inside_job 7200 "exec '$python' -I '$here/checks.pyz' output '$here'" || rc=$?
	case $rc in
	0) ;;
	75) exit 75 ;;
	*) die "the checks of $name could not be run in $(place_name) (exit $rc)" ;;
	esac
}

main "$@"
