# make demo   installs into .venv and lets the embedded model write, with a quarter of its experts in RAM and with all
# make test   installs the test extra and runs the whole suite
# make lint   ruff and mypy --strict
# make sanitize  every kernel under AddressSanitizer and UBSan
# make bench  decode and prefill speed of the embedded model
# make figures  draws the pictures of docs/ from docs/figures
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: demo test lint bench figures sanitize clean

demo: $(VENV)/.run
	$(BIN)/huorn demo

test: $(VENV)/.test
	$(BIN)/python -m pytest

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.run
	$(BIN)/huorn bench decode

figures: $(VENV)/.test
	$(BIN)/python docs/figures/moe_routing.py

# The stamps say which extras the environment holds; a change of what is to be installed makes them stale.
$(VENV)/.run: pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) -e ".[test]"
	touch $@

$(VENV)/.lint: $(VENV)/.run
	$(PIP) -e ".[lint,test]"
	touch $@

# Every kernel under AddressSanitizer and UndefinedBehaviorSanitizer, on every variant that this machine has.
SANITIZED := build/sanitized
SANITIZERS := $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libubsan.so)
sanitize: $(VENV)/.run
	$(PIP) cmake ninja nanobind
	$(BIN)/cmake -G Ninja -S . -B $(SANITIZED) -DHUORN_SANITIZE=ON -DPython_EXECUTABLE=$(abspath $(BIN)/python) \
		-DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja)
	$(BIN)/cmake --build $(SANITIZED)
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \
		$(BIN)/python tests/kernels/exercise.py $(SANITIZED)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
