# Two commands: `make demo` trains the demo on this machine, `make test` runs the tests. `make help` lists the rest.
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
DEMO ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format types clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(STAMP) ## make .venv and install everything in it (quick when nothing changed)

# The virtual environment is made anew when it is not there or its interpreter no longer runs (moved folder, removed Python).
$(STAMP): pyproject.toml constraints.txt scripts/find_python
	@if ! $(BIN)/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then \
		python=$$(PYTHON="$(PYTHON)" sh scripts/find_python) || exit 1; \
		echo "set-up: $(VENV) with $$python"; \
		"$$python" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "set-up: installing (about 5 GB on the first time)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev,tensorboard]'
	@touch $(STAMP)

demo: export CUDA_VISIBLE_DEVICES =
demo: setup ## train the demo on two sites (CPU, a few minutes), merge, evaluate and sample it, write its report
	$(BIN)/leantron pretrain experiment=demo_2sites run.dir=$(DEMO)
	$(BIN)/leantron merge $(DEMO)
	$(BIN)/leantron evaluate $(DEMO)
	$(BIN)/leantron generate $(DEMO) --prompt "def main():" > $(DEMO)/sample.txt
	@cat $(DEMO)/sample.txt
	$(BIN)/leantron report $(DEMO)

test test-slow: export OMP_NUM_THREADS ?= 1

test: setup ## the CPU tests (those that need CUDA skip), in WORKERS processes (2)
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-slow: setup ## the tests that kill and restart real runs
	$(BIN)/python -m pytest -m slow

lint: setup ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: setup ## mypy
	$(BIN)/mypy

clean: ## remove caches and build products (keeps .venv, runs and data)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
