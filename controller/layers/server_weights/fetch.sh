# Brings a model's files into a place, or compares those that are there once more (weights.py says how).
# Arguments: fetch | recheck, the place, the model's key, the Python of the server's environment.
# On standard input, for fetch: what is wanted, JSON; it may hold the Hub's token.
main() {
	what=$1 place=$2 key=$3 python=$4
	enter_place "$place"
	folder=/opt/reconcile/weights
	if [ "$what" = fetch ]; then put - 0600 "$folder/$key.order"; fi
	inside 30 "[ -x '$python' ]" </dev/null || python=$(inside 30 "command -v python3" </dev/null) ||
		die "there is no Python in $(place_name)"
	for name in weights.py worker.py; do
		program "$name" | put - 0644 "$folder/$key.$name" || exit
	done
	order=''
	if [ "$what" = fetch ]; then order="'$folder/$key.order' "; fi
	run="exec '$python' -I '$folder/$key.weights.py' $what $order'$folder/$key.json' '$folder/$key.worker.py'"
	{
		rc=0
		inside_job 172000 "$run" || rc=$?
		printf '%s\n' "$rc" >"$RECONCILE_STEP_DIR/inside-rc"
	} | tell
	read -r rc <"$RECONCILE_STEP_DIR/inside-rc"
	inside 30 "rm -f '$folder/$key.order' '$folder/$key.token' '$folder/$key.weights.py' '$folder/$key.worker.py'" </dev/null || :
	[ "$rc" = 0 ] || exit "$rc"
}

# tell: passes on what is said for people, and notes how far it is.
tell() {
	while IFS= read -r _line; do
		case $_line in
		'progress '*)
			_far=${_line#progress }
			progress "${_far% *}" "${_far#* }"
			;;
		*) printf '%s\n' "$_line" ;;
		esac
	done
}

main "$@"
