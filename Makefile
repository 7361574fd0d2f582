# Two commands do everything on a fresh machine: `make demo` and `make test`. Both make their own .venv first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch>=2.11,<2.14
# PyPI's torch for Linux brings gigabytes of CUDA libraries. Without an NVIDIA driver this index, where it can be reached,
# serves the build for CPUs instead; `make CPU_WHEELS=` leaves the choice to pip's own settings.
CPU_WHEELS ?= https://download.pytorch.org/whl/cpu
NVIDIA_DRIVER ?= /proc/driver/nvidia/version
# pip names each file and its size before it fetches it, and asks nothing.
PIP = $(BIN)/python -m pip install --no-input --disable-pip-version-check
CAN_REACH = $(BIN)/python -c "import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)" "$(CPU_WHEELS)/torch/"

# Before anything is fetched; any Python since 2.7 can read it.
CHECK_VERSION = import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit('d3engine needs Python 3.11 or newer; \
	%s is %d.%d: name a newer one, as in make PYTHON=python3.12 VENV=.venv312' % ((sys.executable,) + v))

NATIVE := $(shell find kernels/native -name "*.cpp" -o -name "*.h" -o -name "*.inc" -o -name build.py)

.PHONY: help setup demo chat test test-server test-parallel test-integrations lint types layers shipped docs inspect ports bench clean

help:
	@echo "make demo     install, and answer a problem at full depth and with D3"
	@echo "make chat     fetch Qwen2.5-Coder-1.5B and its draft model (1.6 GB) once, and talk"
	@echo "make test     all tests"
	@echo "make test-server  the server's, with its page in Chromium, schemathesis and other libraries' clients"
	@echo "make test-integrations  with every serving stack for real; test-with-ray, test-with-triton: with one"
	@echo "make test-parallel  a model over several devices: more ranks, torchrun"
	@echo "make setup    everything a contributor needs, into .venv"
	@echo "make lint     formatting, names, types, layers"
	@echo "make docs     the pages as a site in build/site"
	@echo "make inspect  compile every Triton kernel without a GPU"
	@echo "make ports    the native library for Arm in an emulator, for Windows under Wine, by Clang and under sanitizers"
	@echo "make bench    time the parts"

setup: $(VENV)/.installed-dev $(VENV)/.native $(VENV)/.page
	@echo "Ready. The tools are in $(BIN); CONTRIBUTING.md says how to go on."

demo: $(VENV)/.native
	$(BIN)/d3engine generate demo

# Offline once they are fetched. `make chat MODEL=smollm2` is for machines with little memory; `DRAFT=` drafts nothing.
MODEL = qwen2.5-coder-1.5b
DRAFT = $(if $(filter qwen2.5-coder-1.5b,$(MODEL)),qwen2.5-coder-0.5b)
chat: $(VENV)/.installed-gguf $(VENV)/.native
	@for model in $(MODEL) $(DRAFT); do $(BIN)/d3engine weights fetch $$model || exit 1; done
	@$(BIN)/d3engine chat $(MODEL) $(addprefix --draft-model ,$(DRAFT))

test: $(VENV)/.installed-test $(VENV)/.native
	@echo "All tests: about seven minutes on two free cores, longer on busy ones; none is judged by its time. Where there is"
	@echo "no GPU, Triton's kernels are interpreted. What is skipped is named with its reason at the end."
	$(BIN)/python -m pytest -n 2 --dist worksteal

# Formatting, names, types and layers; `make types` and `make layers` are parts of it.
lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/words.py
	$(MAKE) types layers

# Both look at the package as it is shipped: `kernels` and `weights_tools` in their places inside it.
SHIPPED := build/shipped
types: $(VENV)/.installed-dev shipped
	cd $(SHIPPED) && $(CURDIR)/$(BIN)/mypy --strict --config-file $(CURDIR)/pyproject.toml -p d3engine

layers: $(VENV)/.installed-dev shipped
	cd $(SHIPPED) && PYTHONPATH=. $(CURDIR)/$(BIN)/lint-imports --config $(CURDIR)/pyproject.toml --no-cache

shipped:
	rm -rf $(SHIPPED)
	mkdir -p $(SHIPPED)
	cp -r d3engine $(SHIPPED)/d3engine
	cp -r kernels weights_tools $(SHIPPED)/d3engine/

# The pages of docs/ with the reference, as a site in build/site; fails for a link or a name that leads nowhere, and
# for a table of figures that is not the committed runs' (`python -m benchmarks.pages` writes them).
docs: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.pages --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "The site is in build/site: open build/site/index.html, or for its search too:"
	@echo "$(BIN)/python -m http.server --directory build/site, and then http://127.0.0.1:8000/"

# Compiles every Triton kernel for a GPU that need not be there; fails where one spills registers, keeps too few loads in
# flight, or reads what the kernel before it may not have written yet. `no-pdl` is for devices without programmatic
# launch, and `consumer` for those with 99 KiB of shared memory a program. Kernels that read blocks are bound by
# arithmetic: what they have in flight is not judged.
# Grouped heads have so few queries, keys and values that of int4 too few warps make floats of them, and of bytes at 16 rows.
# `make -k inspect` goes on behind a part that fails, `make inspect-amd` is one part, and INSPECT narrows each of them, as in
# `make inspect-blocks INSPECT="--arch 80 --rows 64"`. What was compiled before a run was cut off is not compiled again.
GROUPED := --may-starve int4:1,int4:8,int4:16,int8:16,fp8:16
PRODUCTS := --operations qkv,linear_residual,gate_up,lm_head
ARCHS := --arch 80,90,100,gfx942,gfx950
inspect-llama2 := --shapes llama2-7b --weights all
inspect-llama3 := --shapes llama3-8b --weights all $(GROUPED)
inspect-qwen3 := --shapes qwen3-8b --operations qkv --weights all $(GROUPED)
inspect-fp8-groups := --shapes llama2-7b $(PRODUCTS) --weights fp8_groups
inspect-small-heads := --shapes small-heads --operations paged_attention --spills-only
inspect-invariant := --shapes llama2-7b,llama3-8b $(PRODUCTS) --weights all --rows 64 --batch-invariant
inspect-no-pdl := --shapes llama3-8b --weights all --no-pdl $(GROUPED)
inspect-amd := --shapes llama3-8b --weights all --arch gfx942,gfx950
inspect-consumer := --shapes llama3-8b --weights all --arch 89,120 --spills-only
inspect-k-quants := --shapes llama3-8b --weights Q4_K,Q6_K $(PRODUCTS),unpack $(ARCHS) --spills-only
inspect-blocks := --shapes llama3-8b --operations gate_up,unpack $(ARCHS) --spills-only \
	--weights Q4_0,Q4_1,Q5_0,Q5_1,Q8_0,Q5_K,U4_32,U4_128,U8_32,U8_128
inspect: $(addprefix inspect-,llama2 llama3 qwen3 fp8-groups small-heads invariant no-pdl amd consumer k-quants blocks)

inspect-%: $(VENV)/.installed
	$(BIN)/python -m d3engine.kernels.inspect $(or $(inspect-$*),$(error there is no part $*)) $(INSPECT)

# The native library by other compilers than an installation's, for Arm and Windows under emulators, and with sanitizers.
ports: $(VENV)/.installed-test $(VENV)/.native
	NATIVE_TEST_FLAGS=-O3 $(BIN)/python -m pytest tests/kernels/native/test_other_builds.py \
		tests/kernels/native/test_sanitized.py --durations=0

# The server's tests with those of its page in a real browser, which need Debian's package `chromium`, with thousands of
# requests made of its description, with the clients of other libraries, and a short soak.
test-server: $(VENV)/.installed-test $(VENV)/.native test-with-clients test-with-litellm
	$(PIP) "playwright>=1.60,<2" "schemathesis>=4.32,<5" "axe-playwright-python>=0.1.8,<0.2" aiohttp
	$(BIN)/python d3engine/server/page_libraries.py || echo "The tests of Markdown on the page are skipped"
	$(BIN)/python -m pytest tests/server
	$(BIN)/python -m benchmarks.soak --minutes 1

# The stacks behind which the engine may stand, for real: each in an environment of its own over that of the tests, since
# what they pin contradicts each other. A stack's packages are in tests/integrations/stacks, its tests in test_STACK*.py.
STACKS := $(patsubst tests/integrations/stacks/%.txt,%,$(wildcard tests/integrations/stacks/*.txt))

test-integrations: $(STACKS:%=test-with-%)

test-with-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pytest tests/integrations/test_$**.py --durations=5

.PRECIOUS: $(VENV)-%/.installed
$(VENV)-%/.installed: tests/integrations/stacks/%.txt $(VENV)/.installed-test $(VENV)/.native
	rm -rf $(@D)
	$(BIN)/python -m venv --without-pip $(@D)
	$(BIN)/python -c "import sysconfig as s; print(f'import site; site.addsitedir({s.get_path(\"purelib\")!r})')" > \
		$$($(@D)/bin/python -c "import sysconfig as s; print(s.get_path('purelib'))")/over.pth
	if [ -e tests/integrations/stacks/$*.bare ]; then $(BIN)/python -m pip --python $(@D)/bin/python install --no-input \
		--no-deps -r tests/integrations/stacks/$*.bare; fi
	$(BIN)/python -m pip --python $(@D)/bin/python install --no-input -r $<
	@touch $@

# A model over several devices: four ranks, torchrun, and mixtures of requests, beside what the gate runs of it.
test-parallel: $(VENV)/.installed-test $(VENV)/.native
	PARALLEL_TESTS=all $(BIN)/python -m pytest tests/executor tests/model/test_part.py tests/benchmarks/test_rank_sums.py

bench: $(VENV)/.installed-test $(VENV)/.native
	$(BIN)/python -m pytest benchmarks --benchmark-only

$(VENV)/bin/python:
	@$(PYTHON) -c "$(CHECK_VERSION)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: $(VENV)/bin/python
	@$(BIN)/python -c "$(CHECK_VERSION)"
	@if [ -n "$(CPU_WHEELS)" ] && [ "$$(uname)" = Linux ] && [ ! -e "$(NVIDIA_DRIVER)" ] && ! command -v nvidia-smi \
		>/dev/null && timeout 15 $(CAN_REACH) 2>/dev/null; then \
		echo "No NVIDIA driver here: torch for CPUs, from $(CPU_WHEELS)"; \
		$(PIP) --timeout 30 --retries 1 --index-url "$(CPU_WHEELS)" "$(TORCH)" || $(PIP) "$(TORCH)"; \
	else $(PIP) "$(TORCH)"; fi
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml setup.py
	$(PIP) --editable .
	@touch $@

# After a change of its sources; an engine does not take a library that is older than they are.
$(VENV)/.native: $(VENV)/.installed $(NATIVE)
	$(BIN)/python kernels/native/build.py || echo "Without the native library tokens take several times longer on a CPU."
	@touch $@

# The installation fetches them too; here after a change of their versions.
$(VENV)/.page: $(VENV)/.installed d3engine/server/page_libraries.py
	$(BIN)/python d3engine/server/page_libraries.py || echo "The server's page shows answers as plain text until they are there."
	@touch $@

$(VENV)/.installed-gguf: $(VENV)/.installed
	$(PIP) --editable ".[gguf]"
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP) --editable ".[eval,plots,test]"
	@touch $@

# It holds all that the tests need, too.
$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) --editable ".[dev]"
	@touch $(VENV)/.installed-test $@

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info
