# Everything runs in a virtual environment in .venv, made here with the exact versions of
# requirements.lock, and made again only when that file or pyproject.toml changes.
#
#   make demo    answer questions over one shared document, with the cache on and off
#   make test    run the tests
#   make lint    ruff: rules and format        make types   mypy
#   make gpu     on a machine with an NVIDIA GPU: its tests, then the kernel suite, into
#                benchmarks/results/kernels-gpu.jsonl
#   make lock    renew requirements.lock from pyproject.toml, in a fresh environment
#
# PYTHON names the interpreter that makes the environment (3.11 or later): make test PYTHON=python3.11

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

# torch is named on its own when the lock is renewed, so that a new one is a decision and not an
# accident.
TORCH  := 2.13.0

.PHONY: demo test gpu lint types lock clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/coppice demo

# The command `pytest`, not `python -m pytest`: the latter puts this folder on the import path, where
# the room `kernels` would hide Hugging Face's package of that name.
# Two processes, each with whole files, so that a file's servers and checkpoints are made once.
test: $(READY)
	$(BIN)/pytest -n 2 --dist loadfile

gpu: $(READY)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo "make gpu needs an NVIDIA GPU, and a build of torch with CUDA" >&2; exit 1; }
	$(BIN)/pytest tests/kernels tests/runtime/test_cuda_engine.py
	$(BIN)/python benchmarks/kernels_gpu.py --json benchmarks/results/kernels-gpu.jsonl

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "coppice needs Python 3.11 or later: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation -e .
	@touch $(READY)

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
