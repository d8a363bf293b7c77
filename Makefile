# The recipes of the house. `make demo PYTHON=python3` uses an environment that exists already.

VENV := .venv
PYTHON ?= $(VENV)/bin/python
# A machine with an NVIDIA driver gets the CUDA build of torch, any other the small CPU build.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
CONSTRAINTS ?= $(if $(GPU),constraints-gpu.txt,constraints.txt)
TORCH_INDEX ?= $(if $(GPU),https://pypi.org/simple,https://download.pytorch.org/whl/cpu)

.PHONY: help install demo test check lint clean
help:
	@echo "make demo     convolutions of a real network, generated, executed, compared with torch"
	@echo "make test     the test suite that needs no GPU"
	@echo "make check    ruff, mypy --strict, and the test suite"
	@echo "make lint     ruff and mypy alone"

install: $(VENV)/ready
$(VENV)/ready: pyproject.toml $(CONSTRAINTS)
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --extra-index-url $(TORCH_INDEX) \
	    -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

# Only the environment in .venv is ours to make.
ready := $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(VENV)/ready)

demo: $(ready)
	$(PYTHON) -m transconv demo

test: $(ready)
	$(PYTHON) -m pytest -q tests -m "not gpu"

lint: $(ready)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m mypy --strict transconv

check: lint test

clean:
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
