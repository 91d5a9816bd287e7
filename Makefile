# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
UV ?= uv
SCENARIO ?= replace
STOCK ?=
QUICK ?=
ONLY ?=

PY := .venv/bin/python
LINT := .venv-lint
COMMA := ,
INSTALL := $(PYTHON) tools/install.py
# From the one list of releases.
RELEASES := $(shell sed -n 's/^TESTED_VLLM = (\(.*\))/\1/p' vllm_nixl_heartbeat/compatibility.py | tr -d '",')
NEWEST := $(lastword $(RELEASES))
# In .venv itself.
INSTALLED := 0.32.0
UNIT := tests/v1/kv_connector/unit
REAL := tests/v1/kv_connector/nixl_integration
# What the lab's servers run.
SERVER := $(or $(VLLM),$(NEWEST))
INSTALL_SERVER := $(INSTALL) $(if $(filter-out $(INSTALLED),$(SERVER)),--server $(SERVER))
LAB := --vllm $(SERVER) $(if $(STOCK),--stock) --output build
# In a process of its own: UCX looks for network devices once, and these tests have
# namespaces with others.
FAULTS := $(REAL)/test_network_faults.py

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed 's/:.*## /\t/' | expand -t 14

.PHONY: install
install: ## Build .venv: vLLM's CPU build, NIXL and this package
	@$(INSTALL)

# Of its own: neither torch nor vLLM is needed to check style and types, and what is
# installed changes no verdict.
$(LINT)/stamp: requirements/lint.txt
	@echo "Building $(CURDIR)/$(LINT)"
	@$(PYTHON) -m venv --clear $(LINT)
	@$(LINT)/bin/python -m pip install --quiet --no-deps -r $<
	@touch $@

.PHONY: lint
lint: $(LINT)/stamp ## Check style and types (needs neither torch nor vLLM)
	@$(LINT)/bin/ruff check .
	@$(LINT)/bin/ruff format --check .
	@$(LINT)/bin/mypy

.PHONY: format
format: $(LINT)/stamp ## Format the code, mend what ruff can mend
	@$(LINT)/bin/ruff check --fix-only --quiet .
	@$(LINT)/bin/ruff format .

# The tests run on the files of the checkout: nothing is installed anew for them.
.PHONY: unit
unit: | .venv ## Unit tests on the newest vLLM that is installed (seconds)
	@$(call on,$(notdir $(lastword $(sort $(wildcard .venv/vllm-*))))) $(PY) -m pytest -q $(UNIT)

.venv:
	@$(INSTALL)

# Environment that has vLLM unpacked to .venv/$(1) first; the installed one if empty.
on = $(if $(1),PYTHONPATH=$(CURDIR)/.venv/$(1) VLLM_TARGET_DEVICE=cpu)

# One stage of `make test`: heading, then a command whose failure ends the run.
define stage
	@printf '\n=== %s\n' "$(1)"
	@$(2)
endef

.PHONY: test
test: install ## Lint, types and every test; no root, nothing outside of the checkout
	@$(INSTALL) --vllm $(NEWEST)
	$(call stage,Style and types,$(MAKE) lint)
	$(call stage,Unit tests on the installed vLLM,$(PY) -m pytest -q $(UNIT))
	$(call stage,Unit tests on vLLM $(NEWEST),$(call on,vllm-$(NEWEST)) $(PY) -m pytest -q $(UNIT))
	@$(PY) tools/promtool.py
	$(call stage,Packaging$(COMMA) tools and documentation,$(PY) -m pytest -q tests/packaging tests/operations tests/docs tests/tools)
	$(call stage,Lab,$(PY) -m pytest -q tests/nixl_lab)
	$(call stage,Benchmarks,$(PY) -m pytest -q tests/benchmarks)
	$(call stage,Costs beside stock,$(PY) -m benchmarks --quick)
	$(call stage,Real NIXL and real vLLM,$(PY) -m pytest -q $(REAL) --ignore $(FAULTS))
	$(call stage,Network faults,$(PY) -m pytest -q $(FAULTS))

.PHONY: demo
demo: install ## Kill a prefill and watch its release (SCENARIO=, VLLM=, STOCK=1)
	@$(INSTALL_SERVER)
	@$(PY) -m nixl_lab.demo --scenario $(SCENARIO) $(LAB)/demo-$(SCENARIO)

.PHONY: bench
bench: install ## Measure costs and speed into docs/benchmarks (ONLY="step_cost ...", QUICK=1)
	@$(INSTALL) --vllm $(NEWEST)
	@$(PY) -m benchmarks $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

.PHONY: gpu-check
gpu-check: ## What a release frees on an NVIDIA GPU (PYTHON= one with vLLM, NIXL and CUDA)
	@$(PYTHON) -m benchmarks.gpu_check

.PHONY: drill
drill: install ## Kill and replace a prefill six times (QUICK=1, STOCK=1, ROUTER=vllm-router)
	@$(INSTALL_SERVER)
	@$(if $(ROUTER),$(PY) -m pip install --quiet --no-deps --target .venv/router --upgrade vllm-router==0.1.17)
	@$(PY) -m nixl_lab.drill $(LAB)/drill$(if $(STOCK),-stock) $(if $(QUICK),--cycles 1) \
	  $(if $(ROUTER),--router $(ROUTER))

.PHONY: soak
soak: install ## Random faults under traffic (MINUTES=60, SEED=)
	@$(INSTALL_SERVER)
	@$(PY) -m nixl_lab.soak --minutes $(or $(MINUTES),60) $(if $(SEED),--seed $(SEED)) \
	  $(LAB)/soak

.PHONY: matrix
matrix: install ## Every supported vLLM x NIXL: tests, servers (ONLY="0.31.0 unit")
	@$(PY) -m nixl_lab.matrix $(if $(ONLY),--only $(ONLY))

.PHONY: fork
fork: ## Commit the connector into a fork of vLLM (VLLM=path, ARGS="--signoff")
	@$(PYTHON) -m tools.fork.series apply $(or $(VLLM),$(error VLLM=path is missing)) $(ARGS)

.PHONY: fork-patches
fork-patches: ## Write the same as patches for `git am` into dist/
	@$(PYTHON) -m tools.fork.series patches $(ARGS)

.PHONY: fork-check
fork-check: install ## vLLM's own hooks and our unit tests on forks of three releases
	@$(INSTALL) $(addprefix --vllm ,$(RELEASES))
	@$(PY) -m tools.fork.check

.PHONY: upstream
upstream: install ## The same, and vLLM's own NIXL suites, stock and ours
	@$(INSTALL) $(addprefix --vllm ,$(RELEASES))
	@$(PY) -m tools.fork.check --suites

.PHONY: lock
lock: ## Resolve requirements/*.in anew with uv
	@for name in build cpu-lab lint test lab; do \
	  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 \
	    --no-annotate --no-emit-package torch --no-emit-package triton \
	    --override requirements/override.in \
	    --custom-compile-command "make lock" \
	    requirements/$$name.in --output-file requirements/$$name.txt; \
	done

.PHONY: clean
clean: ## Remove the environment and every cache
	@rm -rf .venv .venv-lint .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
