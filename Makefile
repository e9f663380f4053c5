# Each target makes .venv from the pinned lock first; nothing else needs to be installed by hand
# but Python 3.11 to 3.13 and make. Java comes with it.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# It takes a third of pip's time. Where pip alone can reach the packages, pip installs them.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --compile-bytecode

.PHONY: demo test unit lint format docs bench chaos lock clean

demo: .venv/ready
	$(BIN)/penstock demo $(ARGS)

# Hundreds of processes start: each module is compiled once, whatever the environment says.
test unit: export PYTHONDONTWRITEBYTECODE =

test: .venv/ready
	$(BIN)/pytest tests -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

unit: .venv/ready
	$(BIN)/pytest tests/unit -n 4 --dist loadfile $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages that are made from the code.
docs: .venv/ready
	$(BIN)/python docs/entities.py
	$(BIN)/python docs/monitoring.py

bench: .venv/ready .venv-bench/ready
	$(BIN)/python -m benchmarks $(or $(ARGS),all)

# The fault test for ten minutes; `make test` runs it briefly.
chaos: .venv/ready
	$(BIN)/python -m tests.chaos --duration 600 $(ARGS)

# Pin again what pyproject.toml asks for.
lock: .venv/ready
	$(BIN)/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header -q -o requirements.lock
	$(BIN)/uv pip compile --group airbyte --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header -q -o src/penstock/syncs/airbyte/requirements.lock
	$(BIN)/uv pip compile --group bench --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header -q -o benchmarks/requirements.lock

.venv/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] <= (3, 13)' 2>/dev/null || \
	  { echo "Penstock needs Python 3.11 to 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	@sed -n '/^uv==/,/# via/p' requirements.lock > .venv/uv.lock
	$(PIP) --require-hashes -r .venv/uv.lock
	$(UV) --require-hashes -r requirements.lock || $(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-build-isolation --no-deps -e .
	@touch $@

.venv-bench/ready: benchmarks/requirements.lock
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

clean:
	rm -rf .venv .venv-bench
