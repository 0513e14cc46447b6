# make test            lint and every test, doctests and notebooks included
# make test-full       the same, compiled as users do and with TensorFlow; then every
#                      configuration starts at its published size; takes hours
# make demo            train, shift and compare, on two cores
# make test PYTHON=python3.12    the same under another interpreter
#
# Each target makes its virtual environment on first use and reuses it afterwards.

PYTHON ?= python3
JOBS ?= 2

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
EXTRAS := test
PYTEST = $(BIN)/python -m pytest -q

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

.PHONY: test test-full full demo clean

# Small programs take longer to optimise than to run.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -n $(JOBS) --dist=loadfile --no-loadscope-reorder

test-full:
	$(MAKE) full VENV=$(VENV)-full EXTRAS=test,prepare

full: $(STAMP)
	$(PYTEST) -m '' -n $(JOBS) --dist=loadfile --no-loadscope-reorder \
	  --ignore=tests/test_published_sizes.py
	$(PYTEST) -m '' tests/test_published_sizes.py
	cat .cache/published_sizes.md

demo: $(STAMP)
	$(BIN)/python -m studies.demo --output=demo

# Some systems ship Python without ensurepip: their own pip then fills the environment.
$(STAMP): setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "relattn needs Python 3.11 or newer: name one by make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf .venv-* .cache .hypothesis .pytest_cache .ruff_cache .import_linter_cache
