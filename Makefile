# make test            lint, a case of each mechanism; minutes on two cores
# make test-full       all tests, with XLA's optimisations, TensorFlow, a TPU's compiler
#                      and a check of the types; then starts every configuration at its
#                      published size; takes hours
# make demo            trains three models, moves the images, compares; minutes on two
#                      cores
# make docs            builds the documentation site, docs/_build/html
# make tables          writes the generated tables of README.md and docs/
# make test PYTHON=python3.12    uses another interpreter
#
# Each target makes a virtual environment on first use and reuses it.

PYTHON ?= python3
JOBS ?= 2

VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
DEMO_STAMP := $(VENV)/installed-train
EXTRAS := test
UV = $(BIN)/uv pip install --quiet --python $(BIN)/python $(PACKAGES)
PYTEST = $(BIN)/python -m pytest -q

export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1

.PHONY: test test-full full onnx export-onnx demo docs site tables clean

# Optimising small programs takes longer than running them. test-full checks the types
# and shapes of arguments at each call, which takes a fifth of the time.
test: export JAX_DISABLE_MOST_OPTIMIZATIONS ?= 1
test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -n $(JOBS) --dist=loadfile --no-loadscope-reorder \
	  --jaxtyping-packages= --durations=30 --durations-min=1

# By pip, whose settings can name a build of PyTorch without CUDA.
test-full:
	$(MAKE) full VENV=$(VENV)-full EXTRAS=test,prepare,docs,pytorch,tpu,types,hf,publish UV=false
	$(MAKE) onnx

# TPUs are only compiled for.
full: export JAX_PLATFORMS ?= cpu
full: $(STAMP)
	$(PYTEST) -m '' -n $(JOBS) --dist=loadfile --no-loadscope-reorder \
	  --ignore=tests/test_published_sizes.py
	$(PYTEST) -m '' tests/test_published_sizes.py
	cat .cache/published_sizes.md

# jax2onnx does not install beside the trainer.
onnx:
	$(MAKE) export-onnx VENV=$(VENV)-onnx EXTRAS=onnx UV=false

export-onnx: $(STAMP)
	$(BIN)/python -m tests.helpers.onnx_models

demo: $(DEMO_STAMP)
	$(BIN)/python -m studies.demo --output=demo

docs:
	$(MAKE) site VENV=$(VENV)-docs EXTRAS=docs

site: $(STAMP)
	$(BIN)/python -m sphinx -q -W --keep-going -E -b html docs docs/_build/html

tables: $(STAMP)
	$(BIN)/python -m tools.tables

# Python's own pip installs into the environment sooner than ensurepip does.
# uv takes a quarter of pip's time, but does not read pip's settings, such as a mirror:
# where it fails, pip installs. What nothing imports need not be compiled.
$(DEMO_STAMP): PACKAGES = --editable '.[train]'
$(STAMP): PACKAGES = --editable '.[$(EXTRAS)]'
$(STAMP) $(DEMO_STAMP): setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "relattn needs Python 3.11 or newer: name one by make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip uv || \
	  $(PYTHON) -m venv $(VENV)
	@start=$$(date +%s); echo "Installing the packages into $(VENV)"; \
	  { $(UV) || $(BIN)/python -m pip install --quiet --no-compile $(PACKAGES); } && \
	  echo "$$(($$(date +%s) - start)) s: installed the packages"
	touch $@

clean:
	rm -rf .venv-* .cache .hypothesis .pytest_cache .ruff_cache .import_linter_cache
