PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=

# Python keeps what it compiled, even where the environment says not to: torch's modules take a second of each start.
export PYTHONDONTWRITEBYTECODE :=

# Two files of tests at a time: compiling on ranks leaves cores idle, and each worker has a pool of ranks of its own. One
# at a time in CI, where nobody waits and the load is not ours.
WORKERS ?= $(if $(CI),0,2)
PYTEST  := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# An exact version lets a package index that has CPU builds serve one; an open range can pull several GB of CUDA.
TORCH  ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.13' || echo 'torch==2.13.0')

.PHONY: help install train test tests quick exhaustive lint bench clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 18

install: $(STAMP)  ## create .venv with everything the other targets need

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-input --no-compile "$(TORCH)" </dev/null
	@# Meanwhile Python compiles torch's modules, once; or else every first process of a run does.
	$(BIN)/python -c "import torch._inductor.compile_fx" >/dev/null 2>&1 & \
	$(BIN)/python -m pip install --quiet --no-input --no-compile -e ".[dev]" </dev/null && wait
	@touch $@

train: $(STAMP)  ## train a byte-level GPT on real text, ZeRO-3 on two processes (ARGS="--help" for options)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node=2 examples/train_lm.py $(ARGS)

test: $(STAMP)  ## formatter, linter, type checker and every test
	@$(MAKE) --no-print-directory -j 2 lint tests

tests:
	$(PYTEST) $(ARGS)

quick: $(STAMP)  ## the tests that are not marked slow: under two minutes
	$(PYTEST) -q -m "not slow" $(ARGS)

exhaustive: $(STAMP)  ## what takes too long for `make test`: all strategies compiled, and kernels in every program
	DBUF_TEST_KERNELS=1 $(PYTEST) -q -m "exhaustive or slow" $(ARGS)

lint: $(STAMP)  ## formatter, linter and type checker
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)  ## compare with peers in one run each
	@set -e; for file in examples/benchmarks/[!_]*.py; do echo "== $$file"; $(BIN)/python "$$file" $(ARGS); done

clean:  ## remove .venv and everything that tools leave behind
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
