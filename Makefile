# Two commands on a fresh machine with Python 3.11+: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
HOST ?= 127.0.0.1
PORT ?= 8000
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve test check format bench clean help

help: ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "%-12s %s\n", $$1, $$2}'

serve: $(VENV)/.installed ## install into .venv and start the service on http://HOST:PORT
	$(BIN)/attn serve --host $(HOST) --port $(PORT)

# Without bytecode every server that the tests start would compile the service anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-dev ## install what tests need and run them
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.installed-dev ## lint, format, strict types, arrows of the house, manifests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	$(BIN)/hadolint Dockerfile

format: $(VENV)/.installed-dev ## put the code into form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: proto
proto: $(VENV)/.installed-dev ## write descriptor and stubs of the Open Inference Protocol anew
	cd service/wire && ../../$(BIN)/python -m grpc_tools.protoc -I . --descriptor_set_out=open_inference.desc --pyi_out=. open_inference.proto

bench: $(VENV)/.installed-dev ## measure the service against its limits, in one run
	$(BIN)/python -m tests.benchmarks.serving
	$(BIN)/python -m tests.benchmarks.weights
	$(BIN)/python -m tests.benchmarks.long
	$(BIN)/python -m tests.benchmarks.accuracy

.PHONY: bench-peers
bench-peers: $(VENV)/.installed-dev ## measure it beside other servers too; installs them outside the repository
	$(BIN)/python -m tests.benchmarks.peers.install
	$(BIN)/python -m tests.benchmarks.serving --cells usual,v2 --peers all
	$(BIN)/python -m tests.benchmarks.perf_analyzer

.PHONY: soak
soak: $(VENV)/.installed-dev ## the long trials: equal bits, overload, disconnects, text beside binary, memory
	$(BIN)/python -m tests.benchmarks.soak

clean: ## remove what was installed and built
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "attn needs Python 3.11 or newer; try make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.python
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/.python
	$(PIP_INSTALL) -e '.[test,check]'
	@touch $@ $(VENV)/.installed
