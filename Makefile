# make run      the whole pipeline, set-up included        make help     every target
# Set-up needs Python 3.11 or newer, git and make; `make PYTHON=python3.12 run` picks the interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# DVC runs `python -m stages.NAME`: that python has to be the environment's.
export PATH := $(CURDIR)/$(BIN):$(PATH)
export DO_NOT_TRACK := true

# `make run scale=tiny reward=mixture overrides="ppo.kl.coef=0.02 ppo.iterations=20"`: every word on make's command line
# that is not make's own goes to the composition, which refuses the ones that it does not know; an environment variable
# that happens to be called `data` chooses nothing. No word passes through the shell's grammar: they go quoted, in an
# environment variable.
OWN := PYTHON SYSTEM_PACKAGES Q upgrade overrides
WORDS := $(foreach word,$(filter-out $(OWN),$(sort $(.VARIABLES))),$(if $(filter command,$(origin $(word))),$(word)))
CHOICES = $(foreach word,$(WORDS),'$(subst ','"'"',$(word)=$(value $(word)))')
given = $(if $(filter command,$(origin $(1))),$(value $(1)))
# Make exports what its command line sets, expanded: `$(...)` in a word would run.
unexport $(WORDS) Q overrides

# Debian packages beyond git and make, for the tests that use them.
SYSTEM_PACKAGES ?= postgresql chromium fonts-dejavu-core iproute2

.PHONY: help setup run repro ui ask serve promote rollback backup restore test test-all lint bench
.PHONY: lock lock-cpu lock-peers gc clean system-deps

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(STAMP) ## the environment in .venv, exactly as requirements.lock has it

# uv comes from the lock as well, by hash; it then installs the rest, without a line for each of 300 packages. Redone only
# when the lock has changed.
$(STAMP): requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "setup: $(PYTHON) is missing or older than 3.11: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "setup: installing requirements.lock into .venv; the first time this downloads 3 GB and more"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock > .venv/uv.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r .venv/uv.txt
	@$(BIN)/uv pip sync --python $(BIN)/python --require-hashes requirements.lock 2>&1 \
		| awk '!/^ [+~-] |^ +(Downloaded|Building|Built) |^Downloading .*\([0-9][0-9]?\.[0-9]+[KM]iB\)/ { print; fflush() }' >&2
	@touch $@

run: export OVERRIDES = $(CHOICES) $(call given,overrides)
run: $(STAMP) ## the whole pipeline: scale= data= reward= critic= kl= seed= overrides="key=value ..."
	@exec $(BIN)/python -m flows.pipeline --from-make "$$OVERRIDES"

repro: export STAGE = $(call given,stage)
repro: $(STAMP) ## dvc repro with params.yaml as it is; stage=NAME stops there
	@$(BIN)/dvc repro $$STAGE

ui: $(STAMP) ## the Prefect and MLflow pages and a worker for the deployments, until Ctrl-C
	@$(BIN)/python -m flows.ui

ask: export QUESTION = $(value Q)
ask: $(STAMP) ## ask the registered policy: make ask Q="Tom has 3 apples ..."
	@$(BIN)/python -m rlhf.ask -- "$$QUESTION"

serve: export ARGUMENTS = $(call given,arguments)
serve: $(STAMP) ## the champion on http://127.0.0.1:8000, until Ctrl-C: make serve arguments="--port 8080"
	@exec $(BIN)/python -m rlhf.serving $$ARGUMENTS

promote rollback: export REASON = $(call given,reason)
promote: export NUMBER = $(call given,version)
promote: $(STAMP) ## make a registered version champion by hand: make promote version=3 reason="..."
	@$(BIN)/python -m rlhf.registry promote --reason="$$REASON" -- "$$NUMBER"

rollback: $(STAMP) ## make the previous champion champion again: make rollback reason="..."
	@$(BIN)/python -m rlhf.registry rollback --reason="$$REASON"

backup: export FILE = $(call given,to)
backup: $(STAMP) ## MLflow's and Prefect's data in one file: make backup to=FILE
	@$(BIN)/python -m tasks.backup save -- "$$FILE"

restore: export FILE = $(call given,from)
restore: $(STAMP) ## put a backup in place: make restore from=FILE; overwrite=1 replaces what is there
	@$(BIN)/python -m tasks.backup restore $(if $(call given,overwrite),--overwrite) -- "$$FILE"

test: $(STAMP) ## the tests that need no server
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not servers"

test-all: test ## every test: also the pipeline on real servers, started for it on loopback, in a browser
	@$(BIN)/python -m pytest -m servers tests/e2e

lint: $(STAMP) ## ruff, mypy, import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

bench: export ARGUMENTS = $(call given,arguments)
bench: $(STAMP) ## speed and memory beside the peers (docs/performance.md): make bench arguments="--rows rollout,update"
	@exec $(BIN)/python -m bench.performance $$ARGUMENTS

lock: $(STAMP) ## renew requirements.lock after a change of pyproject.toml; upgrade=1 takes newer versions
	@$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --universal --generate-hashes --no-annotate --quiet \
		--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
		$(if $(upgrade),--upgrade) --output-file requirements.lock

# The same versions, torch without GPU libraries; from PyTorch's own index, so this one is not committed.
lock-cpu: $(STAMP) ## requirements-cpu.lock, for a container image without GPU libraries (Dockerfile)
	@$(BIN)/uv pip compile pyproject.toml --all-extras --group dev --generate-hashes --no-annotate --quiet \
		--python-platform linux --constraint requirements.lock --torch-backend cpu \
		--no-emit-index-url --no-emit-find-links --custom-compile-command "make lock-cpu" \
		--output-file requirements-cpu.lock

lock-peers: $(STAMP) ## renew bench/peers.lock: what bench compares with, on this project's versions of the rest
	@$(BIN)/uv pip compile bench/peers.in --universal --generate-hashes --no-annotate --quiet \
		--constraint requirements.lock --no-emit-index-url --no-emit-find-links \
		--custom-compile-command "make lock-peers" --output-file bench/peers.lock

gc: export OVERRIDES = $(call given,overrides)
gc: $(STAMP) ## free disk: what ended and former runs left, down to limits.disk_gb: overrides="limits.disk_gb=20"
	@$(BIN)/python -m flows.gc $$OVERRIDES

# The environment, MLflow's and Prefect's databases and DVC's cache stay: the next run restores what it can.
clean: ## remove what the stages wrote and the tools' caches
	@rm -rf data/prepared data/preferences models metrics plots reports runs dvc_plots dvc.lock
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

system-deps: ## Debian packages that the tests want; needs apt-get and root
	@if [ -z "$(strip $(SYSTEM_PACKAGES))" ]; then echo "system-deps: nothing beyond git and make is needed"; \
	elif ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ]; then \
		echo "system-deps: install $(SYSTEM_PACKAGES) with your package manager" >&2; \
	else apt-get update && apt-get install --yes --no-install-recommends $(SYSTEM_PACKAGES); fi
