# make demo   installs into .venv and lets the embedded model write
# make test   installs the test extra and runs the whole suite
# make lint   ruff and mypy --strict
# make bench  decode and prefill speed of the embedded model
# make figures  draws the pictures of docs/ from docs/figures
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: demo test lint bench figures clean

demo: $(VENV)/.run
	$(BIN)/huorn run "def quicksort(items):" --max-tokens 128 --temperature 0.7 --top-p 0.9 \
		--repetition-penalty 1.1 --seed 3

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

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
