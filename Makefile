# `make demo` and `make test` are the two commands to remember; each sets up all it needs in .venv.
# Benchmarks and long examples take minutes more: make test ARGS='-m slow'.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2  # processes that share the test files; tests of hangs and of time limits want a core or so each
BIN := $(VENV)/bin
# uv installs in seconds, where it is there.
INSTALL := $(if $(shell command -v uv),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install)

.DELETE_ON_ERROR:
.PHONY: demo test bench lint docs clean

demo: $(VENV)/.examples
	$(BIN)/python examples/mnist.py

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python bench/run.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --quiet
	@echo out/site/index.html

clean:
	rm -rf $(VENV) out

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# One stamp an extra: newer than pyproject.toml means installed as it says.
$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(INSTALL) --quiet --editable '.[$*]'
	touch $@
