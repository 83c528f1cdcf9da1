# Puts the last good unit of a server in the place of one that failed its checks, and starts it.
# Arguments: the place, the server's name, the Python of its environment, the digests of the unit that is there and of
# the good one. Standard input: the failure, as state.json has it.
main() {
	place=$1 name=$2 python=$3
	enter_place "$place"
	here=/opt/reconcile/server/$name
	rc=0
	inside 660 "exec '$python' -I '$here/checks.pyz' put-back '$here'" || rc=$?
	case $rc in
	0) ;;
	75) exit 75 ;;
	*) die "the last good unit of $name could not be put back in $(place_name) (exit $rc)" ;;
	esac
}

main "$@"
