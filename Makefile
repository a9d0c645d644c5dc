# Every target sets up what it needs: a virtual environment in .venv, installed from pyproject.toml with the pins of
# constraints.txt. The package itself runs on Python 3.10; the pins need 3.11.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench experiments results docs clean

help:
	@echo "make demo     train, evaluate and predict on the handwritten digits; writes report/report.html"
	@echo "make test     the test suite, on two processes"
	@echo "make lint     formatting, ruff and mypy"
	@echo "make format   rewrite the sources in the project's format"
	@echo "make bench    check each operation against its reference, then time it"
	@echo "make experiments   the paper's experiments that fit two cores: hours, resumable; then make results"
	@echo "make results  write docs/results from the committed measurements"
	@echo "make docs     build the documentation into site/"
	@echo "make clean    remove what the other targets made"

install: $(VENV)/.installed

# --clear also replaces an environment whose creation was interrupted or whose Python has gone.
$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later was not found: pass PYTHON=/path/to/python3"; exit 1; }
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[dev]" -c constraints.txt
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --disable-pip-version-check -e ".[docs]" -c constraints.txt
	@touch $@

demo: install
	$(BIN)/weightformer demo

# Small operations run slower, and vary more, when several threads share them.
test bench experiments results: export OMP_NUM_THREADS = 1

test: install
	$(BIN)/python -m pytest -n 2

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/weightformer bench

experiments: install
	$(BIN)/python -m weightformer.analysis.experiments --workers 2

results: install
	$(BIN)/python -m weightformer.analysis.experiments --report_only

# Silences an advertisement that mkdocs-material prints about its successor.
docs: export NO_MKDOCS_2_WARNING = 1

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site report runs build dist .pytest_cache .mypy_cache .ruff_cache
