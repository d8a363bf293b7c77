# The recipes of the house. `make demo PYTHON=python3` uses an environment that exists already.

VENV := .venv
PYTHON ?= $(VENV)/bin/python
# A machine with an NVIDIA driver gets the CUDA build of torch, any other the small CPU build.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
CONSTRAINTS ?= $(if $(GPU),constraints-gpu.txt,constraints.txt)
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: help install demo test check lint clean
help:
	@echo "make demo     convolutions of a real network, generated, executed, compared with torch"
	@echo "make test     the test suite that needs no GPU"
	@echo "make check    ruff, mypy --strict, and the test suite"
	@echo "make lint     ruff and mypy alone"

install:
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
ifeq ($(GPU),)
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)+cpu" 2>/dev/null || \
	    $(VENV)/bin/python -m pip install --quiet --index-url $(CPU_INDEX) "$(TORCH)+cpu"
endif
	$(VENV)/bin/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev]"
	touch $(VENV)/ready

# An environment that somebody made by hand is good enough, if nothing is missing in it.
$(VENV)/ready:
	@$(VENV)/bin/python -c "import hypothesis, mypy, numpy, pytest, sympy, torch, tqdm, triton" \
	    2>/dev/null && touch $@ || $(MAKE) install

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
