# Every command of the project: `make help` lists them. One environment, .venv, pinned by constraints.txt;
# the package in it is the built wheel, never the folders, so what is tested is what users install.

# The demo's run, and the program that sets the environment up. Both may be given: make PYTHON=python3.12 test
DEMO   ?= fit examples/digits.py:task --journal out/digits.jsonl --drawing out/digits.svg
PYTHON ?= python3

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL: # one environment, one installer at a time
.DEFAULT_GOAL := help
MAKEFLAGS   += --no-print-directory

VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Tools are found by name too: `graphviz-pure` and `torchrun` are commands, not modules.
export PATH := $(CURDIR)/$(BIN):$(PATH)

# What the wheel is made of. SOURCES.txt changes when a file comes or goes, which dates alone do not show.
SOURCES := $(sort $(shell find engine backends specs -type f -not -path '*/__pycache__/*' 2>/dev/null))
MADE    := $(VENV)/stamps# a removed .venv takes them along
WHEEL   := dist/.built

.PHONY: help demo test check unit sim nightly test-cuda test-xla bench bench-peers bench-xla test-peers constraints clean install install-demo FORCE

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: install-demo ## train the digits example, with a journal and a drawing in out/
	mkdir -p out
	$(BIN)/interlock $(DEMO)
	$(BIN)/interlock check --journal out/digits.jsonl

test: check unit sim ## everything that must hold for a change to land

check: install ## format, lint, import directions, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/tools/check_imports.py
	MYPYPATH=tests $(BIN)/mypy -p interlock -p tools

# The `pytest` script, not `python -m pytest`: that would make the folders here importable, a second copy.
unit: install ## the tests, on the installed wheel; documents and their examples included
	$(BIN)/pytest $(ARGS)

# A process of its own: the simulated device is registered for the rest of one.
sim: install ## the tests on the simulated device
	$(BIN)/pytest tests/sim $(ARGS)

# Two parts of about the same length: on two machines, or two clones, they may run side by side.
LONG  := INTERLOCK_PROFILE=nightly $(BIN)/pytest -m "nightly or not nightly" -o timeout=1800
FIRST := tests/test_interrupts.py tests/test_mutants.py tests/test_spin.py tests/test_teardown.py

nightly: install ## the long tier; its figures go to docs/evidence/nightly-1.md and nightly-2.md
	$(LONG) --evidence=docs/evidence/nightly-1.md $(FIRST) $(ARGS)
	$(LONG) --evidence=docs/evidence/nightly-2.md $(addprefix --ignore=,$(FIRST)) $(ARGS)

XLA := .venv-xla

# An environment of its own: torch_xla needs torch 2.9. The package is the wheel there too.
test-xla: $(XLA)/.made ## what needs torch_xla: on a TPU where there is one, else on its CPU device; takes 7 GB
	INTERLOCK_XLA=1 $(XLA)/bin/pytest tests/xla $(ARGS)

bench-xla: $(XLA)/.made ## the steps of the engine beside a loop written by hand with torch_xla
	$(XLA)/bin/python benchmarks/run_xla.py $(ARGS)

$(XLA)/.made: tests/xla/constraints.txt $(WHEEL)
	test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	@echo "installing torch 2.9 and torch_xla; the first time takes minutes"
	$(XLA)/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
	    --constraint tests/xla/constraints.txt "$$(echo dist/interlock-*.whl)[xla]" pytest pytest-timeout hypothesis
	$(XLA)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --force-reinstall \
	    dist/interlock-*.whl
	touch $@

test-cuda: install ## what needs an NVIDIA GPU, under ten minutes; without one it says so and runs nothing
	$(BIN)/python tests/tools/cuda_check.py $(ARGS)

bench: install ## the benchmarks
	$(BIN)/python benchmarks/run.py $(ARGS)

PEERS := .venv-peers

bench-peers: $(PEERS)/.made ## the benchmarks beside Lightning, Fabric, Accelerate, Ignite and transformers, in an environment of their own
	$(PEERS)/bin/python benchmarks/run_peers.py $(ARGS)

# The package is the wheel there too; pytest alone is added, from this project's own pins.
test-peers: $(PEERS)/.made ## the tests that need Lightning, transformers and torchmetrics themselves
	$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
	    --constraint constraints.txt pytest pytest-timeout hypothesis
	$(PEERS)/bin/pytest tests/test_bring.py tests/test_evaluation.py $(ARGS)

$(PEERS)/.made: benchmarks/peers/constraints.txt $(WHEEL)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
	    --constraint benchmarks/peers/constraints.txt torch lightning accelerate pytorch-ignite transformers scikit-learn rich transitions
	$(PEERS)/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-deps --force-reinstall \
	    dist/interlock-*.whl
	touch $@

# The environment, in steps that an unchanged tree does not repeat

install: $(MADE)/tools $(MADE)/package ## the whole development environment in .venv
install-demo: $(MADE)/demo $(MADE)/package

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Interlock needs Python 3.11 or newer; try: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv --clear $(VENV)

$(MADE)/base: constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt build setuptools
	@mkdir -p $(MADE)
	touch $@

$(MADE)/SOURCES.txt: FORCE | $(BIN)/python
	@mkdir -p $(MADE)
	@printf '%s\n' $(SOURCES) | cmp -s - $@ || printf '%s\n' $(SOURCES) > $@

# Leftovers of an earlier build would put deleted modules into the wheel.
$(WHEEL): $(SOURCES) $(MADE)/SOURCES.txt $(MADE)/base pyproject.toml README.md LICENSE
	rm -rf build/lib build/bdist.* dist interlock.egg-info
	$(BIN)/pyproject-build --wheel --no-isolation --outdir dist . > $(MADE)/wheel.log 2>&1 \
	    || { cat $(MADE)/wheel.log; exit 1; }
	rm -rf interlock.egg-info
	touch $@

$(MADE)/package: $(WHEEL)
	$(PIP) install --quiet --no-deps --force-reinstall dist/interlock-*.whl
	touch $@

$(MADE)/demo: pyproject.toml constraints.txt | $(WHEEL)
	@echo "installing torch and the rest; the first time takes minutes"
	$(PIP) install --quiet --constraint constraints.txt "$$(echo dist/interlock-*.whl)[demo,svg]"
	touch $@

$(MADE)/tools: pyproject.toml constraints.txt | $(WHEEL)
	@echo "installing torch and the development tools; the first time takes minutes"
	$(PIP) install --quiet --constraint constraints.txt "$$(echo dist/interlock-*.whl)[demo,dev,svg,test]"
	touch $@ $(MADE)/demo

# The newest versions that pyproject.toml allows, except torch: the project chooses when to follow it.
constraints: $(WHEEL) ## resolve constraints.txt anew; make TORCH=2.14.0 constraints moves torch
	rm -rf build/constraints
	$(PYTHON) -m venv build/constraints
	build/constraints/bin/python -m pip --disable-pip-version-check install --progress-bar off \
	    "torch==$(or $(TORCH),$(shell sed -n 's/^torch==//p' constraints.txt))" \
	    "$$(echo dist/interlock-*.whl)[demo,dev,svg,test]"
	sed -n '/^#/p' constraints.txt > build/constraints.txt # the header stays
	build/constraints/bin/python -m pip --disable-pip-version-check freeze --all \
	    | sed -E -e 's/^(torch==[^+]*)\+.*/\1/' -e '/^(pip|interlock)\b/d' >> build/constraints.txt
	mv build/constraints.txt constraints.txt
	rm -rf build/constraints

clean: ## remove everything that was made, the environment too
	rm -rf $(VENV) $(XLA) build dist out interlock.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find engine backends specs tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
