# `make run` and `make test` need nothing but Python >= 3.11: they make .venv first.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: help setup run test lint types bench clean

help:
	@echo "make setup   create $(VENV) with the versions of requirements.lock"
	@echo "make run     run the main experiment (ARGS='--quick' passes flags on)"
	@echo "make test    run the test suite (ARGS='-m slow': the learning samplers)"
	@echo "make lint    ruff: lint and format check"
	@echo "make types   mypy"
	@echo "make bench   run the benchmark"
	@echo "make clean   remove $(VENV) and the caches; results stay"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found:" \
	"install it, or name it with 'make setup PYTHON=/path/to/python'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	"$(PYTHON) is not Python 3.11 or newer:" \
	"install one, or name it with 'make setup PYTHON=/path/to/python'." >&2; exit 1; }
	@echo "Creating $(VENV) (a few minutes, once)."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -r requirements.lock
	@$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@touch $(STAMP)

run: setup
	$(BIN)/python -m experiments.synthetic --form=cubic $(ARGS)

test: setup
	$(BIN)/python -m pytest -n auto $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m experiments.bench $(ARGS)

clean:
	rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
