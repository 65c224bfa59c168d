# The developer's interface; CI calls the same verbs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PROTOS := $(shell find proto -name '*.proto' | sort)
# One thread for each engine: two members share a small machine best that way.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test check proto proto-check sim chaos bench clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make the environment in .venv (first time: a few minutes, about 2 GB)

$(STAMP): pyproject.toml
	@PYTHON='$(PYTHON)' VENV='$(VENV)' sh tools/setup.sh
	@touch $(STAMP)

demo: $(STAMP) ## serve the default model with one prefill and one decode, stream one answer, stop
	@$(BIN)/python -m tandem_cli demo

test: $(STAMP) ## all tests but the chaos rounds
	@echo "==> tests (the default model is fetched once, 93 MB)"
	@$(BIN)/python -m tandem_cli models pull
	@$(BIN)/python -m pytest tests $(ARGS)

check: $(STAMP) ## format, lint, types, imports, ports
	@echo "==> ruff format";  $(BIN)/ruff format --check .
	@echo "==> ruff";         $(BIN)/ruff check .
	@echo "==> mypy";         $(BIN)/python -m mypy lifecycle telemetry rpc text models engine kv_transfer member prefill_svc decode_svc router tandem_cli
	@echo "==> imports";      $(BIN)/lint-imports
	@echo "==> buf lint";     $(BIN)/buf lint
	@$(MAKE) --no-print-directory proto-check

proto: $(STAMP) ## generate the code of the ports
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)
	@echo "==> generated from $(words $(PROTOS)) files"

proto-check: $(STAMP) ## prove that the committed code of the ports is current
	@$(BIN)/python tools/check_proto.py

bench: $(STAMP) ## time to first token, inter-token, tokens a second, hand-over; split against aggregated
	@$(BIN)/python -m tandem_cli models pull
	@$(BIN)/python -m bench $(ARGS)

clean: ## remove the environment and caches of the checkout
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
