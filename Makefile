# Every target works as the first command in a fresh clone: those that need it call `setup` themselves.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SPARK_STAMP := $(VENV)/.spark-ready

SIM_SEEDS ?= 300

.PHONY: help setup setup-spark demo demo-spark test sim defects lint bench faults soak reference proto lock clean

help:
	@echo "make demo         a three-replica cluster, its master killed a few times, and the result"
	@echo "make test         all tests (what a machine lacks is named)"
	@echo "make setup        the virtual environment with .venv/bin/batonmq and .venv/bin/mqctl"
	@echo "make sim          300 simulated lives of a whole cluster (SIM_SEEDS=300)"
	@echo "make defects      whether the simulation finds each of the defects planted in its code"
	@echo "make lint         formatting, lint, types, import layers"
	@echo "make bench        side by side with Apache RocketMQ 5.3.3 (needs a JDK 17 and Maven)"
	@echo "make faults       every fault 20 times on real processes, and the table of what it cost"
	@echo "make soak         the long tests, then an hour of random faults (SOAK_MINUTES=60)"
	@echo "make demo-spark   a dozen failovers of all kinds, and Spark's report on them (JDK 17)"
	@echo "make setup-spark  the packages for Spark and its tests (1.3 GB)"

setup: $(STAMP)

$(STAMP): requirements.lock pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) is missing; Python 3.11 or newer is needed (make PYTHON=python3.12 …)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "setup: $(PYTHON) is older than 3.11" >&2; exit 1; }
	@echo "setup: virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup: packages of requirements.lock (about a minute the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $(STAMP)
	@echo "setup: done; $(BIN)/batonmq and $(BIN)/mqctl are there"

# Spark, Arrow and what their tests need are large (1.3 GB on the disk), so only what needs them installs them.
setup-spark: $(SPARK_STAMP)

$(SPARK_STAMP): requirements-spark.lock $(STAMP)
	@echo "setup: packages of requirements-spark.lock (about a minute the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements-spark.lock
	@touch $(SPARK_STAMP)

demo: $(STAMP)
	@$(BIN)/batonmq demo

demo-spark: $(SPARK_STAMP)
	@$(BIN)/python -m lab.faults.aftermath $(DEMO_ARGS)

# If Spark's packages cannot be fetched, the runner reports that it leaves those tests out.
test: $(STAMP)
	-@$(MAKE) --no-print-directory setup-spark
	@$(BIN)/python -m tests.run

sim: $(STAMP)
	@$(BIN)/python -m lab.sim --seeds $(SIM_SEEDS) --known --jobs 2

# DEFECTS_ARGS='--only NAME': one of lab/sim/defects/
defects: $(STAMP)
	@$(BIN)/python -m lab.sim.defects --jobs 2 $(DEFECTS_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	@$(BIN)/python -m lab.bench.compare $(BENCH_ARGS)

faults: $(STAMP)
	@$(BIN)/python -m lab.faults table $(FAULTS_ARGS)
	@$(BIN)/python -m lab.faults clients $(CLIENTS_ARGS)

SOAK_MINUTES ?= 60
soak: $(STAMP)
	@$(BIN)/python -m tests.run --soak
	@$(BIN)/python -m lab.sim --seeds 10000 --jobs 2
	@$(BIN)/python -m lab.faults soak --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

reference: $(STAMP)
	$(BIN)/python -m lab.reference

proto: $(STAMP)
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. --pyi_out=. batonmq/proto/controller/v1/controller.proto
	# Nothing calls grpc's experimental class, and its name is that of our own service.
	sed -i '/part of an EXPERIMENTAL API/,$$d' proto/controller/v1/controller_pb2_grpc.py

lock:
	$(PYTHON) -m venv .venv-lock && .venv-lock/bin/pip -q install pip-tools
	.venv-lock/bin/pip-compile -q --no-emit-index-url --no-emit-find-links --strip-extras --extra server --extra dev -o requirements.lock pyproject.toml
	.venv-lock/bin/pip-compile -q --no-emit-index-url --no-emit-find-links --strip-extras --extra server --extra spark --extra delta --extra tables --extra recipe-tests --extra report-tests -c requirements.lock -o requirements-spark.lock pyproject.toml
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
