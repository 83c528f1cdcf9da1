# Makes a token by which a place may have a model's files from another host. It never leaves the place but to that host.
# Arguments: the place, the model's key.
main() {
	place=$1 token=/opt/reconcile/weights/$2.token
	enter_place "$place"
	inside 30 "umask 077
mkdir -p /opt/reconcile/weights && rm -f '$token.new' &&
head -c 32 /dev/urandom | sha256sum | cut -c1-64 | tr -d '\\n' >'$token.new' && mv -fT '$token.new' '$token'" </dev/null ||
		die "cannot make a token in $(place_name)"
}

main "$@"
