# Writes the modprobe.d file that keeps nouveau off. Standard input: its text.
# Arguments: the file, and the SHA-256 that it has now ("absent": there is none).
main() {
	replace "$1" "$2"
}

main "$@"
