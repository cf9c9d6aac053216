# make serve    install what is missing, fetch the model, serve it on port 8000
# make test     install what is missing, then run every check and test
# make help     the rest

MODEL ?= smollm2-135m-instruct
PORT ?= 8000
ARGS ?=
VENV ?= .venv
COVERAGE_FLOOR ?= 95
SEEDS ?= 500
CHROMIUM ?= /usr/bin/chromium
FROM ?= 1
# the models that tests marked `weights` use
TEST_MODELS := smollm2-135m-instruct gemma-3-270m

# the first Python that is new enough, unless PYTHON= names one
ifndef PYTHON
PYTHON := $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$python && break; done)
endif

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check
RUN_TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile
# two test workers on two cores: one thread each for matrix products
test-core test-rest: export OPENBLAS_NUM_THREADS = 1

# what the native library is made of; its build directory knows the rest
NATIVE_SOURCES := $(wildcard native/CMakeLists.txt native/build.sh native/cmake/* native/include/* native/src/*)
NATIVE_BUILD = CMAKE=$$(command -v cmake || echo $(CURDIR)/$(BIN)/cmake) sh native/build.sh

.PHONY: faults dst-links ablate quality bench-cpu bench-cpu-full native native-test sanitize qemu codegen help serve test test-browser check test-contract test-core test-rest test-models soak soak-null front-cost format clean fairness iteration-level clients schemathesis test-dialects test-grammars test-beams
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1 \2/p' $(MAKEFILE_LIST) | awk '{printf "  make %-14s", $$2; $$1 = $$2 = ""; print}'
	@echo '  Variables: MODEL= PORT= ARGS="--flags" for serve; PYTHON= for the interpreter (3.10 or newer).'

serve: $(VENV)/.installed $(VENV)/.native ## install if needed, fetch the model if needed, and serve it (MODEL= PORT= ARGS=)
	@exec $(BIN)/octavo serve '$(MODEL)' --port '$(PORT)' $(ARGS)

test: $(VENV)/.installed-dev $(VENV)/.native ## install if needed, then every check and test
	@start=$$(date +%s); \
	$(MAKE) --no-print-directory check && \
	$(MAKE) --no-print-directory test-contract && \
	$(MAKE) --no-print-directory native-test codegen && \
	$(MAKE) --no-print-directory test-models && \
	$(MAKE) --no-print-directory test-core && \
	$(MAKE) --no-print-directory dst && \
	$(MAKE) --no-print-directory test-rest && \
	echo "everything passed in $$(($$(date +%s) - start)) s"

check: $(VENV)/.installed-dev ## lint, format and types
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { echo 'not formatted: run make format' >&2; exit 1; }
	@$(BIN)/mypy
	@echo 'lint, format, types: fine'

test-contract: $(VENV)/.python ## the contract, on a bare interpreter without third-party packages
	@PYTHONPATH=src $(PYTHON) -S -m unittest discover -s tests/contract

test-models: $(VENV)/.installed-dev
	@for model in $(TEST_MODELS); do $(BIN)/octavo models --fetch $$model >/dev/null || exit 1; done

test-core: $(VENV)/.installed-dev ## the core's tests, with its branch coverage
	@$(BIN)/coverage erase
	@$(BIN)/coverage run -m pytest -n 2 --dist loadfile tests/core
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report --skip-covered --fail-under=$(COVERAGE_FLOOR)

test-rest: $(VENV)/.installed-dev ## all other tests
	@$(RUN_TESTS) tests --ignore=tests/core --ignore=tests/contract

test-dialects: $(VENV)/.installed-dev ## 200 tool calls of each dialect, cut at every place
	OCTAVO_SPLITS=all $(BIN)/python -m pytest -q tests/text/test_tool_calls.py

test-grammars: $(VENV)/.installed-dev ## the JSON-schema suite whole: every schema from eight seeds, two vocabularies
	OCTAVO_SCHEMAS=all $(BIN)/python -m pytest -q tests/text/test_json_schemas.py

test-beams: $(VENV)/.installed-dev $(VENV)/.native test-models ## beam search of all 50 prompts of the golden file, against what transformers found
	OCTAVO_BEAMS=all $(BIN)/python -m pytest -q tests/engine/test_beam_golden.py

test-browser: $(VENV)/.installed-dev $(VENV)/.native ## the page at / in headless Chromium, which must be there (CHROMIUM=)
	@$(PIP) $(EDITABLE) '.[browser]'
	@CHROMIUM='$(CHROMIUM)' $(BIN)/python -m pytest tests/browser

# a failing seed goes into tests/dst/kept_seeds.txt, shrunk: make dst SEEDS=1 FROM=1234 ARGS=--shrink
dst: $(VENV)/.installed-dev ## simulate the core from seeds FROM.., SEEDS of them, and check every invariant (ARGS=--edges)
	@PYTHONPATH=src:tests $(BIN)/python -m dst --seeds $(SEEDS) --from $(FROM) $(ARGS)

dst-links: $(VENV)/.installed-dev ## the same of the processes and their messages: any of them dies at any event
	@PYTHONPATH=src:tests/core:tests/serve $(BIN)/python -m link_world --seeds $(SEEDS) --from $(FROM)

faults: $(VENV)/.installed-dev ## break a server under load, fault by fault (ARGS="--times 20 --rows 1,5b --shipping")
	@PYTHONPATH=src:tests $(BIN)/python -m faults $(ARGS)

dst-mutations: $(VENV)/.installed-dev ## defects of the core, one by one, and the invariant that sees each
	@PYTHONPATH=src:tests $(BIN)/python -m dst.mutations $(ARGS)

soak: $(VENV)/.installed-dev ## 16 streaming clients on the real model for two minutes
	@$(BIN)/python benchmarks/soak.py

front-cost: $(VENV)/.installed-dev $(VENV)/.native ## CPU of the front end by token, and serving against offline (ARGS=)
	@$(BIN)/python benchmarks/front_cost.py --json benchmarks/results/front-cost.json $(ARGS)

soak-null: $(VENV)/.installed-dev ## 10^6 short requests to the null model, with cancels and a fault a minute (ARGS=)
	@$(BIN)/python benchmarks/soak_null.py --json benchmarks/results/soak-null.json --svg benchmarks/results/soak-null.svg $(ARGS)

fairness: $(VENV)/.installed $(VENV)/.native ## a flooding tenant beside a quiet one, on the real model
	@$(BIN)/python benchmarks/fairness.py $(ARGS)

iteration-level: $(VENV)/.installed $(VENV)/.native ## iteration-level against static batching, on the real model
	@$(BIN)/python benchmarks/iteration_level.py $(ARGS)

clients: $(VENV)/.installed-dev $(VENV)/.native ## the clients that people use, each as it is, against a real server (ARGS=--write)
	@$(BIN)/python scripts/clients/run.py $(ARGS)

schemathesis: $(VENV)/.installed-dev $(VENV)/.native ## 10,000 cases over our own OpenAPI document, against a real server (ARGS=--write)
	@$(PIP) $(EDITABLE) '.[schemathesis]'
	@$(BIN)/python scripts/schemathesis/run.py $(ARGS)

# a few minutes on a quiet machine; benchmarks/peers.py says how to name the peers
bench-cpu: $(VENV)/.installed $(VENV)/.native ## the CPU engine against its bars, and against the peers that are named
	@$(BIN)/python benchmarks/bench_cpu.py $(ARGS)

bench-cpu-full: $(VENV)/.installed $(VENV)/.native ## the same with every format and the larger shapes
	@$(BIN)/python benchmarks/bench_cpu.py --full $(ARGS)

quality: $(VENV)/.installed $(VENV)/.native ## what each format loses on a text, beside llama.cpp's (ARGS="--peers DIR"), against the bars
	@OPENBLAS_NUM_THREADS=1 $(BIN)/python benchmarks/quality.py $(ARGS)

native: $(VENV)/.cmake ## build the native library again where its sources changed
	@$(NATIVE_BUILD) && touch $(VENV)/.native

native-test: $(VENV)/.native ## the library's own tests, in C++
	@sh native/check.sh plain

sanitize: $(VENV)/.cmake ## the same under the address and undefined, then the thread sanitizer
	@sh native/check.sh address,undefined && sh native/check.sh thread

qemu: $(VENV)/.cmake ## the same for ARM, run by qemu and held against vectors of this machine
	@sh native/check.sh qemu

codegen: $(VENV)/.native ## no dot loop of a table keeps a vector on the stack
	@$(PYTHON) native/tests/check_codegen.py build/native/CMakeFiles/octavo_objects.dir/src/kernels_*.o

ablate: $(VENV)/.cmake ## what the orders that promise equal bytes cost: whole steps without each of them (ARGS="bf16")
	@sh native/tests/ablate.sh $(ARGS)

format: $(VENV)/.installed-dev ## format the sources and mend what lint can mend
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean: ## remove .venv and everything that installing and testing leave behind (models stay in the cache)
	rm -rf $(VENV) build dist src/octavo/backends/_native src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# ---- installing: a stamp for each, renewed when pyproject.toml changes

$(VENV)/.python: Makefile
	@if [ -z '$(PYTHON)' ]; then \
		echo 'error: Octavo needs Python 3.10 or newer, and none was found. Install one, or name it: make PYTHON=/path/to/python' >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		found=$$(command -v $(PYTHON) >/dev/null && $(PYTHON) -V 2>&1 || echo 'no program here'); \
		echo "error: Octavo needs Python 3.10 or newer; $(PYTHON) is $$found. Name another: make PYTHON=/path/to/python" >&2; exit 1; }
	@mkdir -p $(VENV) && touch $@

$(BIN)/python: | $(VENV)/.python
	@echo 'creating $(VENV)'
	@$(PYTHON) -m venv $(VENV) || { \
		echo 'error: this Python cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }

# The library is built apart from the package, in a folder that keeps what did not change.
EDITABLE := --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace --editable

$(VENV)/.cmake: | $(BIN)/python
	@cmake --version >/dev/null 2>&1 || $(PIP) cmake ninja
	@touch $@

# A machine without a compiler is told so here, once; a source that does not compile is an error.
$(VENV)/.native: $(NATIVE_SOURCES) | $(VENV)/.cmake
	@echo 'building the native library: a few minutes the first time'
	@$(NATIVE_BUILD) >$(VENV)/native.log || { status=$$?; cat $(VENV)/native.log; test $$status -eq 3; }
	@touch $@

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo 'installing Octavo into $(VENV)'
	@$(PIP) $(EDITABLE) .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo 'installing Octavo and what its tests need into $(VENV)'
	@$(PIP) $(EDITABLE) '.[dev]'
	@touch $(VENV)/.installed $@
