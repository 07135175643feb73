# The two commands are `make demo` and `make test`; each does all of its own set-up.
# Every service and the parity reference has a lock and a .venv of its own, synced again whenever its lock changes.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:
# Engines import for 10 s less when the bytecode of the first start is kept; compiling all of it at once takes longer.
unexport PYTHONDONTWRITEBYTECODE

UV := .tools/uv/bin/uv
SERVICES := services/coordinator services/rollout services/reward services/trainer
SERVICE_ENVS := $(SERVICES:%=%/.venv/.synced)
REFERENCE_ENV := tests/reference/.venv/.synced
DEV_ENV := .venv/.synced
LIBS := $(wildcard libs/*/pyproject.toml)
OPTIONS_services/rollout := --extra cpu
OPTIONS_tests/reference := --extra trl

help:
	@echo 'make demo    set up, then train tiny Beam on chained sums on this machine'
	@echo 'make test    set up, then lint and run every test'
	@echo 'make bench   set up, then run the benchmarks'
	@echo 'make setup   only set up the four services'
	@echo 'make lint    ruff, the type checker and the import rules'
	@echo 'make clean   remove environments, caches and runs'

demo: setup
	@bin/beamline run tiny-beam run.name=demo --overwrite

test: setup $(REFERENCE_ENV) $(DEV_ENV)
	@.venv/bin/python tools/run_tests.py

bench: setup $(REFERENCE_ENV)
	@bin/python coordinator -m benchmarks.bench

lint: setup $(DEV_ENV)
	@tools/lint.sh

setup: $(SERVICE_ENVS)

# uv and a Python 3.12 that really runs; the script is quick when both are there, and touches the file only on a change.
.tools/python: FORCE
	@tools/bootstrap.sh

$(SERVICE_ENVS): %/.venv/.synced: %/pyproject.toml %/uv.lock $(LIBS) .tools/python
	$(call sync,$*)

$(REFERENCE_ENV): %/.venv/.synced: %/pyproject.toml %/uv.lock .tools/python
	$(call sync,$*)

$(DEV_ENV): pyproject.toml uv.lock .tools/python
	$(call sync,.)

define sync
@start=$$SECONDS; echo "setting up $(1)"; \
UV_PYTHON="$$(cat .tools/python)" $(UV) sync --quiet --locked --project $(1) $(OPTIONS_$(1)) || \
{ echo "make: $(1) could not be set up; if its pyproject.toml was edited, lock it anew: $(UV) lock --project $(1)" >&2; exit 1; }; \
touch $(1)/.venv/.synced; echo "set up $(1) in $$((SECONDS - start)) s"
endef

clean:
	rm -rf .venv $(SERVICES:%=%/.venv) tests/reference/.venv .tools runs .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.PHONY: help demo test bench lint setup clean FORCE
FORCE:
