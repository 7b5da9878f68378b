# `make demo` and `make test` are the two commands to remember; each sets up all it needs in .venv.
# `make gpu` proves and measures synk on a GPU, in eight minutes; without one it runs in small.
# `make test` runs the fast tests. ARGS='-m slow' runs the slow tests, ARGS='-m gang' the tests of several processes, ARGS='-m ""' all.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2  # processes that share the tests; tests of hangs and of time limits need a core each
BIN := $(VENV)/bin
# uv installs in seconds, if it is there.
INSTALL := $(if $(shell command -v uv),uv pip install --python $(BIN)/python,$(BIN)/python -m pip install)

.DELETE_ON_ERROR:
.PHONY: demo test bench gpu lint docs clean

demo: $(VENV)/.examples
	$(BIN)/python examples/mnist.py

test: $(VENV)/.test
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

bench: $(VENV)/.bench
	$(BIN)/python bench/run.py $(ARGS)

gpu: $(VENV)/.bench $(VENV)/.test
	if nvidia-smi --list-gpus >/dev/null 2>&1; then $(INSTALL) --quiet 'jax[cuda12]'; fi
	$(BIN)/python bench/gpu.py $(ARGS)

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

# A stamp for each extra: if it is newer than pyproject.toml, the extra is installed.
$(VENV)/.%: pyproject.toml | $(BIN)/python
	$(INSTALL) --quiet --editable '.[$*]'
	touch $@
