# The developer's interface; CI calls the same verbs.
#   make setup PYTHON=/path/to/python3.11   another interpreter
#   make test ARGS='-k cancel -x'           arguments for pytest; also for bench
PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# The same with what draws the pictures of make bench-peer.
DRAWS  := $(VENV)/.draws
# The ports of the last release.
BASELINE := proto/baseline.binpb
PROTOS := $(shell find proto -name '*.proto' | sort)
CODE   := lifecycle telemetry rpc text models engine kv_transfer member prefill_svc decode_svc router tandem_cli
# Random walks through the pure parts and the store's scripts, each compared with a plain model of it.
MODELS := $(wildcard tests/unit/test_*_model.py tests/unit/test_grants_*.py tests/contract/test_*_model.py)
ROUNDS ?= 3
SEED   ?= 1
# The first round of chaos, to play one again.
FIRST  ?= 0
# The type that its members compute in: bfloat16 where the native backend runs, unless named.
DTYPE  ?=
# Tests that start whole cells, and processes for the others.
CELLS  := tests/e2e tests/chaos tests/soak tests/scaling
WORKERS ?= 2
# How long make soak begins new waves, and make fuzz goes on.
MINUTES ?= 30
# Simulated worlds that make sim runs, and the first one's seed: fresh ones each time.
SEEDS  ?= 300
ifndef WORLD
WORLD  := $(shell date +%s)
endif
# One thread for each engine: two members share a small machine best that way.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup system model demo test check audit fuzz proto proto-check proto-baseline sim chaos soak bench bench-peer bench-growth bench-cell clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

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

# What starts whole cells has the machine for itself; the others run side by side. With ARGS, all in one process.
test: system model ## all tests, twenty rounds of chaos among them
ifeq ($(ARGS),)
	@failed=0; \
	echo "==> tests side by side, $(WORKERS) at once"; \
	$(BIN)/python -m pytest tests $(CELLS:%=--ignore=%) -n $(WORKERS) --dist worksteal --durations=30 || failed=1; \
	echo "==> tests of whole cells"; \
	$(BIN)/python -m pytest $(CELLS) --durations=30 || failed=1; \
	exit $$failed
else
	@echo "==> tests"
	@$(BIN)/python -m pytest tests $(ARGS)
endif

check: $(STAMP) ## format, lint, types, imports, ports; the ports break nothing of the last release
	@echo "==> ruff format";  $(BIN)/ruff format --check .
	@echo "==> ruff";         $(BIN)/ruff check .
	@echo "==> mypy";         $(BIN)/python -m mypy $(CODE)
	@echo "==> imports";      $(BIN)/lint-imports
	@echo "==> buf lint";     $(BIN)/buf lint
	@echo "==> buf breaking"; $(BIN)/buf breaking --against $(BASELINE)
	@$(MAKE) --no-print-directory proto-check

audit: $(STAMP) ## known faults in what is installed, by the advisories of the package index; says so when they cannot be reached
	@echo "==> audit";        $(BIN)/python -m tools.audit

fuzz: $(STAMP) ## MINUTES of any bytes for every service, token, key set and setting; a failure says the seed that finds it again
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) $(ARGS)

proto: $(STAMP) ## generate the code of the ports, and docs/api.md
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=proto --pyi_out=proto --grpc_python_out=proto $(PROTOS)
	@$(BIN)/python tools/api_reference.py > docs/api.md
	@echo "==> generated from $(words $(PROTOS)) files"

proto-baseline: $(STAMP) ## at a release: later changes of the ports are compared with what they are now
	@$(BIN)/buf build --exclude-source-info -o $(BASELINE)
	@echo "==> $(BASELINE) is what the ports are now"

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

soak: system model ## MINUTES of mixed requests and faults: nothing may grow, every end must be right; SEED chooses which
	@$(BIN)/python -m tests.soak --minutes $(MINUTES) --seed $(SEED) $(ARGS)

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
