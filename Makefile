# Everything runs inside .venv, which the first call makes and later calls reuse.
PYTHON ?= python3
BIN := .venv/bin
# What takes longest is said at the end, so that it is seen when it comes in.
PYTEST := $(BIN)/python -m pytest -q --durations 20 --durations-min 2
# Two processes of tests: each waits for much of its time, for ranks and commands that start.
TWO := --numprocesses 2 --dist worksteal
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Dozens of interpreters import the same modules: the first one keeps what it compiled, where the user's shell forbids it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo demo-disk demo-fold demo-serve demo-diffusion test all-but-kernels kernels-then-benchmarks check lint interpret kernels parity e2e benchmarks soak gpu gpu-pack

install: .venv/.installed

# Modules are compiled when they are imported, which most of them never are: it is half of what an install takes. A pip
# of today looks through the registry's lists in half the time of the one that Python brings.
# lm_eval comes without what it asks for: pytablewriter, which only its tables need, forbids our python-dateutil, and
# its metrics of other tasks need scipy and scikit-learn. colabfold, whose client of alignments is tested, asks for
# older versions of biopython and pandas. What their clients need is in the extra `dev`.
.venv/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[llm,diffusion,fold,relax,serve,dev]"
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt --no-deps lm_eval colabfold
	touch $@

check: lint
	$(PYTEST) $(TWO) tests/unit

lint: install
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/pyright
	$(BIN)/lint-imports

interpret: install
	TRITON_INTERPRET=1 $(PYTEST) tests/kernels

kernels: interpret
	$(BIN)/python -m core.kernels.compile

parity: install
	$(PYTEST) $(TWO) tests/parity

e2e: install
	$(PYTEST) $(TWO) tests/e2e

# Every benchmark in its quick form, so that none rots; it measures nothing and writes no result.
benchmarks: install
	$(BIN)/python -m benchmarks.run --quick

# Kernels, and behind them the benchmarks, share the machine with type checks, which one core runs, and with what waits.
# Unit tests, parity and commands are one call, so that all is imported once, and commands, which wait, run beside ranks,
# which compute.
test: install
	$(MAKE) --no-print-directory --jobs=2 --output-sync=line all-but-kernels kernels-then-benchmarks

kernels-then-benchmarks: interpret
	$(BIN)/python -m benchmarks.run --quick

# Three, of which one waits at most times.
all-but-kernels: lint
	$(PYTEST) --numprocesses 3 --dist worksteal tests/unit tests/parity tests/e2e

soak: install
	$(BIN)/python -m pytest -q -m soak tests/soak tests/unit
	$(PYTEST) $(TWO) -m soak tests/parity
	$(PYTEST) $(TWO) -m gpu --device cpu tests/gpu tests/e2e
	$(BIN)/python -m core.kernels.compile

# Where there is a GPU there may be no registry: by .venv where it is, else by the machine's own Python and .gpu-pack.
gpu:
	$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.gpu tests

# The wheels that images for GPUs lack, fetched where there is a registry and brought along (docs/gpu.md).
gpu-pack: install
	$(BIN)/python -m benchmarks.gpu.pack

demo: install
	$(BIN)/python -m apps.llm.demo

# A model of ten times the device's budget and three times the host's, on a disk.
demo-disk: install
	$(BIN)/python -m apps.llm.demo_disk

demo-fold: install
	$(BIN)/python -m apps.fold.demo

# What `make demo` trained, in 8 bits, for a browser; trains it first where it is not there.
demo-serve: install
	test -f runs/demo/hf/config.json || $(BIN)/python -m apps.llm.demo
	$(BIN)/python -m apps.serve --model runs/demo --quantize int8

# A subject from four pictures, into the pipeline that comes with the program.
demo-diffusion: install
	$(BIN)/python -m apps.diffusion.demo
