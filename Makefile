# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make their own .venv first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The CPU build of torch on machines whose package index offers it; elsewhere pip takes what the index has.
TORCH ?= torch>=2.11,<2.14

.PHONY: demo test lint docs inspect bench clean

demo: $(VENV)/.installed
	$(BIN)/d3engine generate demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n 2

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict d3engine/depth d3engine/kv_cache.py d3engine/scheduler.py d3engine/plan.py d3engine/request.py

# The pages of docs/ with the reference, as a site in build/site; fails for a link or a name that leads nowhere.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "The site is in build/site: open build/site/index.html"

# Compiles every Triton kernel for a GPU that need not be there; fails where one spills registers.
inspect: $(VENV)/.installed
	$(BIN)/python -m d3engine.kernels.inspect --shapes llama2-7b,llama3-8b --weights all

bench: $(VENV)/.installed-test
	$(BIN)/python -m pytest benchmarks --benchmark-only

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml setup.py
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable ".[eval,plots,test]"
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
