# Commands of the project. `make demo PYTHON=python3` uses an existing environment.

VENV := .venv
PYTHON ?= $(VENV)/bin/python
# A machine with an NVIDIA driver gets the CUDA build of torch, any other the small CPU build.
GPU := $(shell command -v nvidia-smi 2>/dev/null)
CONSTRAINTS ?= $(if $(GPU),constraints-gpu.txt,constraints.txt)
CPU_INDEX := https://download.pytorch.org/whl/cpu
TORCH := $(shell grep '^torch==' constraints.txt)
NEWEST := .newest
XPU := .xpu

# What is measured, and where the files go: a folder for each GPU.
LISTS ?= resnet50
OUT ?= bench/results
GPU_NAME ?= $(or $(if $(GPU),$(shell $(GPU) --query-gpu=name --format=csv,noheader | head -n 1 | \
    tr ' A-Z' '_a-z')),cpu)

MEASURES := measure-layers measure-right measure-networks measure-dropin measure-ablation measure-tune \
    measure-issues
.PHONY: help install demo test integrations check check-all docs newcomer lint house matrix matrix-xpu mutants \
    sanitize sanitize-triton release report-images clean measure $(MEASURES)
help:
	@echo "make demo     convolutions of a real network, generated, executed, compared with the answer"
	@echo "make test     the test suite that needs no GPU"
	@echo "make integrations  with the packages of others: nnU-Net, diffusers and more, in Triton's interpreter"
	@echo "make check    ruff, mypy --strict, and the test suite"
	@echo "make lint     ruff and mypy alone"
	@echo "make docs     the documentation as a site in build/site; warnings are errors"
	@echo "make newcomer  README and every page of docs/ typed in an empty environment with the wheel"
	@echo "make house    figures of the architecture: sizes, imports, names, with limits"
	@echo "make matrix   the golden problems compiled for every chip, by two releases of Triton"
	@echo "make matrix-xpu  the same for Intel's GPUs, by Triton's release for them and ocloc; and computations"
	@echo "              executed through OpenCL on the CPU (docs/intel.md)"
	@echo "make mutants  mutation testing: 100 drawn bugs (N=, SEED=) planted one at a time in the rooms that"
	@echo "              decide numbers, into bench/results/mutation.csv; and parts of keys omitted one by one"
	@echo "make report-images  the pictures of docs/report.md, with Chromium"
	@echo "make sanitize  on a GPU: every family of kernels under compute-sanitizer's memcheck and racecheck"
	@echo "make sanitize-triton  kernels with the checks of Triton's own sanitizers: on a GPU with its Triton's"
	@echo "              ConSan; the golden problems compiled with ConSan, GSan and FpSan of the newest release"
	@echo "make check-all  the nightly run: everything above, and what takes too long for it"
	@echo "make release  the source distribution and the wheel, in dist/, built and checked; needs no network"
	@echo "make measure  all that bench/results has, on this GPU: LISTS='resnet50 layers.json' OUT=$(OUT)"
	@echo "              GPU_NAME=folder; or a part of it: $(MEASURES)"

install:
	test -x $(VENV)/bin/python || python3 -m venv $(VENV)
ifeq ($(GPU),)
	$(VENV)/bin/python -m pip install --quiet --no-compile "$(TORCH)+cpu" 2>/dev/null || \
	    $(VENV)/bin/python -m pip install --quiet --no-compile --index-url $(CPU_INDEX) "$(TORCH)+cpu"
endif
	$(VENV)/bin/python -m pip install --quiet --no-compile -c $(CONSTRAINTS) -e ".[dev]"
	@$(VENV)/bin/python -m compileall -q -j 0 $(VENV)/lib > /dev/null || true  # by all cores; pip takes one
	touch $(VENV)/ready

# An environment made by hand is used if no package is missing in it.
$(VENV)/ready:
	@$(VENV)/bin/python -c "import hypothesis, jinja2, mkdocs, mypy, nbclient, numpy, pytest; \
	    import selenium, sympy, torch, torchao, tqdm, triton, xdist" 2>/dev/null && touch $@ || $(MAKE) install

# Only the environment in .venv is ours to make.
ready := $(if $(filter $(VENV)/bin/python,$(PYTHON)),$(VENV)/ready)

demo: $(ready)
	$(PYTHON) -m transconv demo

# A second Triton, beside the one that torch is pinned to.
$(NEWEST)/ready: constraints-newest.txt
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target $(NEWEST) -r $<
	touch $@

# The whole matrix takes some 20 minutes on two cores; `make test` compiles a share of it. The cuobjdump of the
# pinned Triton does not read sm_103 and sm_121.
matrix: export TRITON_CUOBJDUMP_PATH := $(abspath $(NEWEST))/triton/backends/nvidia/bin/cuobjdump
matrix: $(ready) $(NEWEST)/ready
	$(PYTHON) -m transconv matrix --triton installed,$(NEWEST)
	PYTHONPATH=$(NEWEST) $(PYTHON) -m pytest -q tests/backend_triton/test_triton_interpreter.py \
	    tests/torch_ops/test_interpreted.py

# A third Triton, for Intel GPUs; ocloc is the system's (constraints-xpu.txt).
$(XPU)/ready: constraints-xpu.txt
	$(PYTHON) -m pip install --quiet --no-deps --upgrade --target $(XPU) -r $<
	touch $@

# Some 15 minutes on two cores.
matrix-xpu: $(ready) $(XPU)/ready
	$(PYTHON) -m transconv matrix --triton $(XPU)
	$(PYTHON) -m pip install --quiet -e ".[opencl]"
	$(PYTHON) -m pytest -q tests -m xpu
	$(PYTHON) -m transconv fuzz --computes 100 --seed 1 --opencl --no-corpus --limit 240

# Two workers get whole files, in the order of tests/durations.json (`pytest tests --update-durations` times
# them anew). Their many child processes share what
# Python compiles, also where the environment forbids to write it.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -q tests -n 2 --dist loadfile --no-loadscope-reorder

test: $(ready)
	@$(MAKE) --no-print-directory $(NEWEST)/ready || \
	    echo "NOT TESTED: the newest Triton (constraints-newest.txt) could not be installed"
	$(PYTEST) -m "not gpu and not slow and not xpu and not integrations"

# In an environment of its own, made on top of the project's torch; some 40 minutes on two cores.
OTHERS := .integrations
$(OTHERS)/ready: constraints-integrations.txt pyproject.toml | $(ready)
	test -x $(OTHERS)/bin/python || $(PYTHON) -m venv $(OTHERS)
	echo "import site; site.addsitedir('$$($(PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")')" \
	    > $$($(OTHERS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth
	$(OTHERS)/bin/python -m pip install --quiet --no-deps torchvision==$$(sed -n 's/^torchvision==//p' $<)
	$(OTHERS)/bin/python -m pip install --quiet -c $< -e ".[integrations]" msgspec
	$(OTHERS)/bin/python -m pip download --quiet --no-deps --only-binary :all: -c $< -d $(OTHERS)/servers vllm sglang
	touch $@

integrations: $(OTHERS)/ready
	OMP_NUM_THREADS=1 PYTHONPATH=. $(OTHERS)/bin/python -m pytest -q tests/integrations

lint: $(ready)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

check: lint test

house: $(ready)
	@$(PYTHON) -m tests.house.metrics

docs: $(ready)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --site-dir build/site

# Programs and commands of README and docs/, in the order of each page; some 25 minutes on two cores.
newcomer: $(ready)
	$(PYTHON) -m tests.docs.newcomer

# Some 55 minutes on two cores. Kernels are interpreted here; on a GPU the same commands run them.
check-all: check matrix mutants newcomer
	$(PYTEST) -m "(slow or hypothesis) and not gpu and not xpu and not integrations"
	$(PYTHON) -m transconv fuzz --n 2000 --seed 1 --interpreter
	TRITON_INTERPRET=1 $(PYTHON) -m tests.functional.test_samples
	$(PYTHON) -m tests.graph.draw --n 500
	TRITON_INTERPRET=1 $(PYTHON) -m tests.graph.draw --n 100 --shapes 4 --dynamic none,true,false --time-budget 600
	$(PYTHON) -m transconv check --engine=numpy --mb=1 --dir=FWD_B,BWD_D,BWD_W --dt=f32,f16 --tag=abx,axb \
	    --batch=bench/problems/edge_cases.txt
	$(PYTHON) -m tests.torch_ops.attack --n 300
	TRITON_INTERPRET=1 $(PYTHON) -m tests.torch_ops.attack --n 30 --seed 1

# Some 10 minutes for the parts of keys and texts, a process for each. The drawn mutants take some 30, and the
# record of what each test executes about as long as `make test`; it is kept in build/mutation, and of what
# is in the file of results nothing is tried again.
N ?= 100
SEED ?= 1
mutants: $(ready)
	@$(PYTHON) -c "import mutmut" 2>/dev/null || $(PYTHON) -m pip install --quiet mutmut
	$(PYTHON) -m tests.verify.mutants
	$(PYTHON) -m tests.mutation --n $(N) --seed $(SEED)

# Of docs/report.md; needs Chromium and chromedriver.
report-images: $(ready)
	$(PYTHON) -m tests.report.screenshots docs/images

SANITIZER := compute-sanitizer --target-processes all --error-exitcode 9
FAMILIES := -m transconv fuzz --file tests/verify/families.txt --n 0 --no-corpus --jobs 4
sanitize:
	$(SANITIZER) --tool memcheck $(PYTHON) $(FAMILIES)
	$(SANITIZER) --tool racecheck $(PYTHON) $(FAMILIES)

# On a GPU some 5 minutes on 16 cores; without one, where nothing is executed, some 40 on two.
sanitize-triton: $(if $(GPU),,$(NEWEST)/ready)
ifneq ($(GPU),)
	TRITON_INSTRUMENTATION_MODE=consan $(PYTHON) $(FAMILIES) --jobs 12 --limit 400
else
	$(PYTHON) -m transconv matrix --triton $(NEWEST) --targets sm_90 --sanitizer consan,gsan,fpsan \
	    --timeout 900 --csv $(OUT)/triton_sanitizers.csv
endif

# Builds the current transconv/ and tests it as a user would install it.
release: $(ready)
	rm -rf build dist *.egg-info
	$(PYTHON) -m build --no-isolation --outdir dist .
	TRANSCONV_DIST=dist $(PYTHON) -m pytest -q tests/test_release.py

# What a command has written is not measured again: one that was stopped goes on.
RAW = $(OUT)/$(GPU_NAME)
FILES = $(foreach list,$(LISTS),$(or $(wildcard bench/problems/$(list).txt),$(list))) $(if $(GPU),,--mb 1)
BUDGET ?= 36000
LONG = --out $(RAW) --time-budget $(BUDGET)
REPORTED = timing check networks overhead
measure: $(MEASURES)
	$(PYTHON) -m bench report --out $(RAW) $(REPORTED:%=$(RAW)/%.csv)

measure-layers: $(ready)
	$(PYTHON) -m bench time $(FILES) $(LONG) --layouts nhwc,nchw
	$(PYTHON) -m bench time $(FILES) $(LONG) --props fwd --epilogue bias+relu --baselines cl,nchw,fused

measure-right: $(ready)
	$(PYTHON) -m transconv fuzz --seed 1 $(if $(GPU),--n 20000,--n 200 --interpreter) \
	    --time-budget $(BUDGET) --json $(RAW)/fuzz.json
	$(PYTHON) -m bench check $(FILES) $(LONG) --dtypes bf16,f16,f32,tf32

measure-networks: $(ready)
	$(PYTHON) -m bench networks $(LONG) $(if $(GPU),,--small)
	$(PYTHON) -m bench networks $(LONG) $(if $(GPU),,--small) --compiled
	$(PYTHON) -m bench networks $(LONG) $(if $(GPU),,--small) --graphs

measure-dropin: $(ready)
	$(PYTHON) -m bench dropin $(LONG)
	$(PYTHON) -m bench samples $(LONG)
	$(PYTHON) -m bench overhead --out $(RAW)

measure-ablation: $(ready)
	$(PYTHON) -m bench ablation $(FILES) $(LONG)

measure-issues: $(ready)
	$(PYTHON) -m bench issues $(LONG) $(if $(GPU),,--small)

measure-tune: $(ready)
	$(PYTHON) -m transconv tune $(FILES) --db $(RAW)/tuned.csv --time-budget $(BUDGET)
	$(PYTHON) -m bench trials $(RAW)/tuned.trials.csv --docs $(RAW)/trials.md

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
