.DEFAULT_GOAL := help
SHELL := /bin/sh
PYTEST := .venv/bin/python -m pytest
# Much of the lab's time is waiting. Each worker has a lab of its own.
WORKERS := -n 3 --dist worksteal

.PHONY: help
help: ## Show what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: ## The story on a simulated fleet, told as it runs: no root, no GPU
	@scripts/setup base
	@scripts/demo

.PHONY: test
test: ## Everything that can be tested here; the lab too when root
	@scripts/setup dev
	@if [ "$$(id -u)" -eq 0 ]; then tests/lab/install-packages.sh && tests/monitoring/install-packages.sh; fi
	@$(MAKE) --no-print-directory lint
	@$(PYTEST) -m alone tests/world tests/run $(PYTEST_ARGS)
	@$(PYTEST) -m "not alone" $(WORKERS) $(PYTEST_ARGS)

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

.PHONY: test-image
test-image: ## The image, built from the Dockerfile, runs the demo and the loop: root, two minutes
	@scripts/setup dev
	@tests/image/install-packages.sh
	@RECONCILE_REQUIRE_IMAGE=1 $(PYTEST) -m image -s tests/image $(PYTEST_ARGS)

.PHONY: lint
lint: ## Style, types, imports, shell scripts
	@scripts/setup dev
	@scripts/lint

.PHONY: bench
bench: ## Against ansible, pyinfra and OpenSSH, into bench/results.json
	@scripts/setup dev
	@bench/run

SOAK_SECONDS ?= 60
.PHONY: soak
soak: ## Random schedules of faults on simulated fleets, SOAK_SECONDS=60, on all cores
	@scripts/setup dev
	@.venv/bin/python -m tests.proof.soak $(SOAK_SECONDS) $(SOAK_ARGS)

.PHONY: mutants
mutants: ## Guards broken one at a time: some test has to notice each; half an hour
	@scripts/setup dev
	@.venv/bin/python -m tests.proof.mutants

FUZZ_SECONDS ?= 120
.PHONY: fuzz
fuzz: ## Coverage-guided fuzzing of parsers and of the spec loader, FUZZ_SECONDS=120
	@scripts/setup fuzz
	@.venv/bin/python -m tests.proof.fuzz $(FUZZ_SECONDS)
