# The developer's interface; CI calls the same verbs.
#   make setup PYTHON=/path/to/python3.11   another interpreter
#   make test ARGS='-k cancel -x'           arguments for pytest; also for bench
PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROTOS := $(shell find proto -name '*.proto' | sort)
CODE   := lifecycle telemetry rpc text models engine kv_transfer member prefill_svc decode_svc router tandem_cli
# Random walks through the pure parts and the store's scripts, each compared with a plain model of it.
MODELS := $(wildcard tests/unit/test_*_model.py tests/unit/test_grants_*.py tests/contract/test_*_model.py)
ROUNDS ?= 3
SEED   ?= 1
SEED   ?= 1
# One thread for each engine: two members share a small machine best that way.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup model demo test check proto proto-check sim chaos bench clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make the environment in .venv (first time: minutes, 2 GB or more); a second run goes on where it stopped
	@echo "==> $(VENV) is ready; the command is $(BIN)/tandem"

$(STAMP): pyproject.toml
	@PYTHON='$(PYTHON)' VENV='$(VENV)' sh tools/setup.sh
	@touch $(STAMP)

model: $(STAMP)
	@$(BIN)/tandem models pull

demo: $(STAMP) ## serve the default model with one prefill and one decode member, stream one answer, stop
	@$(BIN)/tandem demo

test: model ## all tests but the rounds of chaos
	@echo "==> tests"
	@$(BIN)/python -m pytest tests -m 'not chaos' $(ARGS)

check: $(STAMP) ## format, lint, types, imports, ports
	@echo "==> ruff format";  $(BIN)/ruff format --check .
	@echo "==> ruff";         $(BIN)/ruff check .
	@echo "==> mypy";         $(BIN)/python -m mypy $(CODE)
	@echo "==> imports";      $(BIN)/lint-imports
	@echo "==> buf lint";     $(BIN)/buf lint
	@$(MAKE) --no-print-directory proto-check

proto: $(STAMP) ## generate the code of the ports
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)
	@echo "==> generated from $(words $(PROTOS)) files"

proto-check: $(STAMP) ## prove that the committed code of the ports is current
	@$(BIN)/python tools/check_proto.py

sim: $(STAMP) ## ROUNDS random walks through allocator, grants, schedulers, sequence and store, with fresh seeds
	@for round in $$(seq $(ROUNDS)); do \
	  echo "==> round $$round of $(ROUNDS)"; $(BIN)/python -m pytest $(MODELS) --hypothesis-seed=random $(ARGS) || exit 1; \
	done

chaos: model ## ROUNDS rounds in which a member is killed or stopped while requests run; SEED chooses which
	@ROUNDS=$(ROUNDS) SEED=$(SEED) $(BIN)/python -m pytest tests -m chaos -s $(ARGS)

bench: model ## time to first token, inter-token, tokens a second, hand-over; split against aggregated
	@$(BIN)/python -m bench $(ARGS)

clean: ## remove the environment and the caches of this checkout
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
