# The Python environments of ours in each place: finished ones by their markers, folders without one; CUDA toolkits.
root=${root-}

environments() {
	if plain /opt/reconcile/env; then
		for path in "$inside"/opt/reconcile/env/*; do
			name=${path##*/}
			digest=${name%.json}
			case $digest in '' | *[!0-9a-f]*) continue ;; esac
			if [ "$name" != "$digest" ]; then
				want "/opt/reconcile/env/$name"
				continue
			fi
			plain "/opt/reconcile/env/$digest" || continue
			printf 'env %s\n' "$digest"
			# The interpreter is a link to one of the place's own, which is not followed from here.
			if plain "/opt/reconcile/env/$digest/bin" && [ -L "$path/bin/python" ]; then printf 'whole %s\n' "$digest"; fi
		done
	fi
	for path in "$inside"/usr/local/cuda-*/version.json; do want "${path#"$inside"}"; done
}

places environments || return 1
wanted
