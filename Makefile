# Two commands matter: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Images of containers set it, and a hundred processes of the tests import the library.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-faults test-torch test-peers test-browser test-package test-oldest mutate notebooks docs serve bench gallery hooks lint types format clean

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/digits.py

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=loadscope

# Processes that are killed, stopped, late or wrong, everywhere that others may wait for them; long runs
# of which nothing is left; runs that are killed and go on. make test-faults QUICK=1 takes a part.
test-faults: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/faults $(if $(QUICK),-m quick)

# The comparisons with live torch and grain, which the base suite does without.
test-torch: $(VENV)/.installed-torch
	$(BIN)/python -m pytest tests/live

# What torch's, torchdata's, accelerate's and grain's own tests hold, asked of our samplers.
test-peers: $(VENV)/.installed-torch
	$(BIN)/python -m pytest tests/peers

# The report's page in a real browser; needs a chromium on the PATH.
test-browser: $(VENV)/.installed-test
	$(BIN)/python -m pytest tests/browser

# The built wheel in an environment of its own, as a user gets it.
test-package: $(VENV)/.installed-package
	$(BIN)/python -m pytest tests/package

# The suite on the oldest dependencies that pyproject.toml allows.
test-oldest:
	mkdir -p .venv-oldest
	$(PYTHON) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["dependencies"], sep="\n")' | sed 's/>=/==/' > .venv-oldest/oldest.txt
	PIP_CONSTRAINT=$(CURDIR)/.venv-oldest/oldest.txt $(MAKE) test VENV=.venv-oldest

# Mutations of the core that the tests must notice; make mutate ONLY=train/ runs those of a room.
mutate: $(VENV)/.installed-test
	$(BIN)/python tests/mutate.py $(ONLY)

# What diagnose says of common spellings, torch's DDP among them.
gallery: $(VENV)/.installed-torch
	$(BIN)/python examples/gallery.py

notebooks: $(VENV)/.installed-notebooks
	$(BIN)/python examples/notebooks/run.py

# The site, into site/: open site/index.html as it is, or `make serve` for search too.
docs: $(VENV)/.installed-docs
	$(BIN)/python -m mkdocs build --strict

serve: docs
	$(BIN)/python -m http.server --directory site --bind 127.0.0.1 8000

bench: $(VENV)/.installed-torch
	$(BIN)/python benchmarks

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python

# Lint and types before every commit; pre-commit itself comes from `pip install pre-commit`.
hooks: $(VENV)/.installed-test
	pre-commit install

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .jax_cache build dist

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "make: Python 3.11 or newer is needed. Name it: make PYTHON=python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and by version, so that pip never takes another build for a looser range
$(VENV)/.installed-torch: $(VENV)/.installed-test
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[test,torch,grain,bench,wild]'
	@touch $@

$(VENV)/.installed-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e '.[$*]'
	@touch $@
