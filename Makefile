# The developer's interface; CI calls the same verbs.
#   make setup PYTHON=/path/to/python3.11   another interpreter
#   make test ARGS='-k cancel -x'           arguments for pytest; also for bench
PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The same with what draws the pictures of make bench-peer.
DRAWS  := $(VENV)/.draws
PROTOS := $(shell find proto -name '*.proto' | sort)
CODE   := lifecycle telemetry rpc text models engine kv_transfer member prefill_svc decode_svc router tandem_cli
# Random walks through the pure parts and the store's scripts, each compared with a plain model of it.
MODELS := $(wildcard tests/unit/test_*_model.py tests/unit/test_grants_*.py tests/contract/test_*_model.py)
ROUNDS ?= 3
SEED   ?= 1
MINUTES ?= 5
# The first round of chaos, to play one again.
FIRST  ?= 0
# The type that its members compute in: bfloat16 where the native backend runs, unless named.
DTYPE  ?=
# Simulated worlds that make sim runs, and the first one's seed: fresh ones each time.
SEEDS  ?= 300
ifndef WORLD
WORLD  := $(shell date +%s)
endif
# One thread for each engine: two members share a small machine best that way.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup system model demo test check audit fuzz proto proto-check sim chaos bench bench-peer bench-growth bench-cell clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make the environment in .venv (first time: minutes, 2 GB or more); a second run goes on where it stopped
	@echo "==> $(VENV) is ready; the command is $(BIN)/tandem"

$(STAMP): pyproject.toml
	@PYTHON='$(PYTHON)' VENV='$(VENV)' sh tools/setup.sh
	@touch $(STAMP)

# Debian packages for some tests, where this may install them.
system:
	@sh tools/system_packages.sh

model: $(STAMP)
	@$(BIN)/tandem models pull

demo: $(STAMP) ## serve the default model with one prefill and one decode member, stream one answer, stop
	@$(BIN)/tandem demo

test: system model ## all tests, twenty rounds of chaos among them
	@echo "==> tests"
	@$(BIN)/python -m pytest tests $(ARGS)

check: $(STAMP) ## format, lint, types, imports, ports
	@echo "==> ruff format";  $(BIN)/ruff format --check .
	@echo "==> ruff";         $(BIN)/ruff check .
	@echo "==> mypy";         $(BIN)/python -m mypy $(CODE)
	@echo "==> imports";      $(BIN)/lint-imports
	@echo "==> buf lint";     $(BIN)/buf lint
	@$(MAKE) --no-print-directory proto-check

audit: $(STAMP) ## known faults in what is installed, by the advisories of the package index; says so when they cannot be reached
	@echo "==> audit";        $(BIN)/python -m tools.audit

fuzz: $(STAMP) ## MINUTES of any bytes for every service, token, key set and setting; a failure says the seed that finds it again
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

proto: $(STAMP) ## generate the code of the ports
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)
	@echo "==> generated from $(words $(PROTOS)) files"

proto-check: $(STAMP) ## prove that the committed code of the ports is current
	@$(BIN)/python tools/check_proto.py

sim: $(STAMP) ## SEEDS cells in virtual time, then ROUNDS random walks through the pure parts and the store, with fresh seeds
	@echo "==> $(SEEDS) worlds from seed $(WORLD)"
	@PYTHONHASHSEED=0 $(BIN)/python -m tests.simulation --first $(WORLD) --seeds $(SEEDS)
	@for round in $$(seq $(ROUNDS)); do \
	  echo "==> round $$round of $(ROUNDS)"; $(BIN)/python -m pytest $(MODELS) --hypothesis-seed=random $(ARGS) || exit 1; \
	done

chaos: system model ## ROUNDS rounds of killed, stopped and cut-off processes while requests run; SEED chooses which
	@ROUNDS=$(ROUNDS) SEED=$(SEED) FIRST=$(FIRST) DTYPE=$(DTYPE) $(BIN)/python -m pytest tests/chaos -m chaos -s $(ARGS)

bench: model ## time to first token, inter-token, tokens a second, hand-over; split against aggregated; ARGS=--profile: where the time goes
	@$(BIN)/python -m bench $(ARGS)

bench-peer: model $(DRAWS) ## the same load on vLLM's CPU build, in turns (installs it into .venv-peer, 4 GB); the table goes to bench/results
	@$(BIN)/python -m bench.peer $(ARGS)

$(DRAWS): $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $(DRAWS)

bench-growth: $(STAMP) ## what tokens, requests and idle requests cost as there are more of them; one router and two
	@$(BIN)/python -m bench.growth $(ARGS)

# TRACE: JSON lines with timestamp (ms), input_length and output_length (tokens).
bench-cell: $(STAMP) ## a simulated cell of hundreds of members under the requests of TRACE: goodput by policy and rate
	@$(BIN)/python -m bench.cell_simulation $(TRACE) $(ARGS)

clean: ## remove the environment and the caches of this checkout
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
