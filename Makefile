# From a bare machine with python3 (3.11 or newer, with venv):
#   make demo    train the handwritten-digits example in an environment of its own (.demo)
#   make test    lint, types and tests in an environment of its own (.venv)
#   make test-all        the same with every cell of the large matrices; make test takes a share that changes by commit
#   make tests-shuffled  the tests in random order; SEED=7 picks one
#   make clients  libraries built on Lightning and Accelerate, tested with these and with Paceline; about an hour
#   make loggers  the loggers of services with their packages, offline; about three minutes
#   make streams  data sets that stream, killed and resumed; about twenty minutes
#   make gpu      tests and benchmarks on a machine with a GPU; 25 minutes at most, installs nothing
#   make torches  the tests with the oldest and the newest torch; about half an hour each
#   make tpu     the tests of devices on a TPU that is XLA on the CPU; about two minutes
#   make release  wheel and source distribution in dist/, tried with every Python of this machine; about half an hour
#   make docs    the documentation as a site of static files in build/docs; about a minute
#   make faults  the long form of the fault suite: 200 kills (see tests/faults/strikes.py), half an hour
# PYTHON=python3.12 picks another interpreter; pip's own settings (PIP_EXTRA_INDEX_URL, ...) are respected.

SHELL := bash
PYTHON ?= python3
BIN := .venv/bin
PIP_FLAGS := --quiet --disable-pip-version-check
# The pip that comes with Python may be years old, and take twice as long.
NEW_PIP := $(shell grep '^pip==' requirements-dev.lock)
ENOUGH := import sys; sys.exit(sys.version_info < (3, 11) and f"Python {sys.version.split()[0]} is too old for the pinned tools, which need 3.11. Install a newer one and name it: make PYTHON=python3.12 ...")

# When make began, also where it calls itself: the tests report the time since then.
ifndef PACELINE_MAKE_BEGAN
export PACELINE_MAKE_BEGAN := $(shell date +%s)
endif
# Two workers share the cores, so each computes on one thread.
export OMP_NUM_THREADS := 1
# Tests start some thousand processes; compiling the package anew in each costs more than the bytecode takes. Most
# modules of the pinned packages are never imported: Python compiles those that are, instead of pip all of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-all lint types tests tests-all tests-shuffled faults clients loggers streams torches tpu release gpu docs format demo clean

# The type checker has one thread, and tests wait for processes: side by side they take less time. Its errors come last.
test test-all: lint
	@found=$$(mktemp); trap 'rm -f $$found' EXIT; $(MAKE) -s types > $$found 2>&1 & types=$$!; \
	$(MAKE) --no-print-directory $(@:test%=tests%); tests=$$?; wait $$types || { cat $$found; exit 1; }; exit $$tests

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed
	$(BIN)/pyright --pythonpath $(BIN)/python

tests tests-all: .venv/installed
	$(BIN)/python -m pytest tests -n 2 --dist worksteal $(if $(@:tests=),--all-cells)

faults: .venv/installed
	PYTHONPATH=tests $(BIN)/python tests/faults/strikes.py --kills 200

# The environments are in .clients; CLIENTS="--only litgpt --keep" picks one library and keeps its environment.
clients:
	@$(PYTHON) -c '$(ENOUGH)'
	$(PYTHON) clients/run.py $(CLIENTS)

# Each service has an environment of its own, in .loggers, on top of .venv; LOGGERS="--only aim" picks one.
loggers: .venv/installed
	$(BIN)/python clients/loggers/run.py $(LOGGERS)

# The environment is in .streams, on top of .venv; STREAMS="--only litdata" picks one package.
streams: .venv/installed
	$(BIN)/python clients/streams/run.py $(STREAMS)

# A machine with a GPU may have no network, so this runs with the packages of PYTHON. GPU=--smoke tries it on the CPU.
gpu:
	$(PYTHON) benchmarks/gpu.py $(GPU)

# Each torch has an environment of its own, in .torches, on top of .venv; TORCHES="--only 2.12.1" picks one.
torches: .venv/installed
	$(BIN)/python clients/torches/run.py $(TORCHES)

# TorchTPU is in an environment of its own, .tpu, on top of .venv; TPU="-k resumed" picks tests.
tpu: .venv/installed
	$(BIN)/python clients/tpu/run.py $(TPU)

# Each Python has an environment of its own, in .release; RELEASE="--only 3.12" picks one. Nothing is uploaded.
release: .venv/installed
	$(BIN)/python clients/release/run.py $(RELEASE)

SEED ?= $(shell date +%j)
tests-shuffled: .venv/installed
	$(BIN)/python -m pytest tests -n 2 --dist worksteal --random-order-bucket=global --random-order-seed=$(SEED)

docs: .venv/installed
	rm -rf build/docs docs/reference docs/sources
	$(BIN)/python -m sphinx -W --keep-going -q -j 2 docs build/docs
	@echo "Open file://$(CURDIR)/build/docs/index.html"

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: .demo/installed
	.demo/bin/python examples/01_first_fit.py

# A stamp each: the pinned packages are installed again when the lock changes, the package itself when its metadata does.
.venv/locked: requirements-dev.lock
	@$(PYTHON) -c '$(ENOUGH)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) $(NEW_PIP)
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-compile -r requirements-dev.lock
	touch $@

.venv/installed: .venv/locked pyproject.toml
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps --no-build-isolation -e .
	touch $@

.demo/installed: requirements-dev.lock pyproject.toml
	@$(PYTHON) -c '$(ENOUGH)'
	$(PYTHON) -m venv .demo
	.demo/bin/python -m pip install $(PIP_FLAGS) $(NEW_PIP)
	.demo/bin/python -m pip install $(PIP_FLAGS) --no-compile -c requirements-dev.lock setuptools
	.demo/bin/python -m pip install $(PIP_FLAGS) --no-compile -c requirements-dev.lock --no-build-isolation -e . scikit-learn matplotlib
	touch $@

clean:
	rm -rf .venv .demo .clients .loggers .streams .torches .tpu .release build dist *.egg-info .pytest_cache .ruff_cache runs \
		docs/reference docs/sources
