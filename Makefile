.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTEST := .venv/bin/python -m pytest
# Much of the lab's time is waiting. Each worker has a lab of its own.
WORKERS := -n 3 --dist worksteal

.PHONY: help
help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: ## The story on a simulated fleet, told as it runs: no root, no GPU
	@scripts/setup base
	@scripts/demo

.PHONY: test
test: ## Everything that can be tested here; the lab too when root
	@scripts/setup dev
	@if [ "$$(id -u)" -eq 0 ]; then tests/lab/install-packages.sh; fi
	@$(MAKE) --no-print-directory lint
	@$(PYTEST) $(WORKERS) $(PYTEST_ARGS)

.PHONY: test-vm
test-vm: ## Binding and boot on a real kernel in a virtual machine: root, ten minutes
	@scripts/setup dev
	@tests/vm/install-packages.sh
	@RECONCILE_REQUIRE_VM=1 $(PYTEST) -m vm tests/vm $(PYTEST_ARGS)

.PHONY: test-engines
test-engines: ## Real engines on this machine's CPU: gigabytes, and an hour or two
	@scripts/setup dev
	@for name in transformers vllm sglang; do tests/engines/install $$name .engines/$$name; done
	@RECONCILE_REQUIRE_ENGINES=1 RECONCILE_RUNS=$${RECONCILE_RUNS:-200} $(PYTEST) -s tests/engines $(PYTEST_ARGS)

.PHONY: lint
lint: ## Style, types, imports, shell scripts
	@scripts/setup dev
	@scripts/lint

.PHONY: bench
bench: ## Against ansible, pyinfra and OpenSSH, into bench/results.json
	@scripts/setup dev
	@bench/run
