# make demo: set up, then diagnose a real model · make test: set up, then the tests · make bench: speed and memory
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test check bench clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[demo]"
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $@ $(VENV)/.demo

demo: $(VENV)/.demo
	$(BIN)/sinklab diagnose $(if $(wildcard runs/demo/run.json),--overwrite)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	$(BIN)/python benchmarks/diagnose.py
	$(BIN)/python benchmarks/patch.py

clean:
	rm -rf $(VENV) runs
