# make demo      train a head live, restore it, and race it against transformers' generate()
# make test      the tests, with a stated sample of the large grids (those marked sampled(n): one case in n)
# make test-all  every test: slow ones, and the large grids whole
# make docs      the site, from docs/, into build/site, with its links checked
# make mutants   does a test notice each stated mutation of the source? An hour or more
# make lint      ruff, mypy and import-linter
# make clean     removes what these made
# Each makes its own environment in .venv first, once; PYTHON=python3.12 chooses the interpreter.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= logical
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all docs mutants lint clean

help:
	@sed -n '1,9s/^# //p' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)

$(STAMP): requirements.txt setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "make: specheads needs Python 3.11 or later, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1); try make PYTHON=python3.12" >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps xgrammar==0.2.8 apache-tvm-ffi==0.1.15.post2  # triton is for GPUs
	$(BIN)/python -m pip install --quiet -e . --no-deps --no-build-isolation
	@touch $@

demo: $(STAMP)
	$(BIN)/specheads demo $(ARGS)

# One process for each processor, at most 8, each with one thread: the threads of tiny matrices only wait for one another.
# worksteal gives each process whole files, so that what a file's tests share is made once.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal -m "not slow" $(ARGS)

test-all: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --maxprocesses 8 --dist worksteal $(ARGS)

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet mkdocs-material==9.8.2 mkdocstrings-python==2.0.11
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet -f docs/site/mkdocs.yml
	@echo "build/site/index.html"

mutants: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/support/mutate_source.py --jobs 2 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
