# make demo   set up, then stock against patched on a real small model and on one larger than the caches
# make test   set up, then the tests; make test-all adds the long statistical and random programmes
PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test test-all lint types check bench clean

demo: $(VENV)/.ready
	$(RUN) examples/quickstart.py

test: $(VENV)/.ready
	$(RUN) -m pytest

test-all: $(VENV)/.ready
	$(RUN) -m pytest -m "long or not long"

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.ready
	$(RUN) -m mypy

check: lint types test-all

bench: $(VENV)/.ready
	$(RUN) -m benchmarks.run

$(VENV)/.ready: pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache
