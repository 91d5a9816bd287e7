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
INSTALL := $(PYTHON) tools/install.py
NEWEST := 0.33.0
UNIT := tests/v1/kv_connector/unit
REAL := tests/v1/kv_connector/nixl_integration
DRILL := build/drill/$(if $(STOCK),stock,ours)$(if $(QUICK),-quick)
# What a drill of the stock connector is compared with, if it is there.
OURS := $(subst stock,ours,$(DRILL))
# In a process of its own: UCX looks for network devices once, and these tests have
# namespaces with others.
FAULTS := $(REAL)/test_network_faults.py

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | sed 's/:.*## /\t/' | expand -t 14

.PHONY: install
install: ## Build .venv: vLLM's CPU build, NIXL and this package
	@$(INSTALL)

.PHONY: lint
lint: install ## Check style and types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

# One stage of `make test`: heading, then a command whose failure ends the run.
define stage
	@printf '\n=== %s\n' "$(1)"
	@$(2)
endef

.PHONY: test
test: install ## Lint, types and every test
	@$(INSTALL) --vllm $(NEWEST) --browser
	$(call stage,Style and types,$(MAKE) lint)
	$(call stage,Unit tests on vLLM 0.32.0,$(PY) -m pytest -q $(UNIT))
	$(call stage,Unit tests on vLLM $(NEWEST),PYTHONPATH=$(CURDIR)/.venv/vllm-$(NEWEST) VLLM_TARGET_DEVICE=cpu $(PY) -m pytest -q $(UNIT))
	$(call stage,Packaging and documentation,$(PY) -m pytest -q tests/packaging tests/docs)
	$(call stage,Lab and tools,$(PY) -m pytest -q tests/nixl_lab tests/tools)
	$(call stage,Costs beside stock,$(PY) -m benchmarks --quick)
	$(call stage,Real NIXL and real vLLM,$(PY) -m pytest -q $(REAL) --ignore $(FAULTS))
	$(call stage,Network faults,$(PY) -m pytest -q $(FAULTS))

.PHONY: demo
demo: install ## Kill a prefill and watch the decoder let go (SCENARIO=, STOCK=1)
	@$(PY) -m nixl_lab.demo --scenario $(SCENARIO) $(if $(STOCK),--stock)

.PHONY: bench
bench: install ## Measure costs and speed into docs/benchmarks (ONLY="step_cost ...", QUICK=1)
	@$(PY) -m benchmarks $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY))

.PHONY: gpu-check
gpu-check: ## What a release frees on an NVIDIA GPU (PYTHON= one with vLLM, NIXL and CUDA)
	@$(PYTHON) -m benchmarks.gpu_check

.PHONY: drill
drill: install ## Kill and replace a prefill six times under traffic (QUICK=1, STOCK=1)
	@$(PY) -m nixl_lab.drill --output $(DRILL) $(if $(QUICK),--cycles 1) \
	  $(if $(STOCK),--stock $(addprefix --compare ,$(wildcard $(OURS)/drill.json)))

.PHONY: matrix
matrix: install ## Unit and real-NIXL tests on vLLM 0.31.0, 0.32.0 and 0.33.0
	@$(PY) -m nixl_lab.matrix

.PHONY: fork
fork: ## Commit the connector into a fork of vLLM (VLLM=path, ARGS="--signoff")
	@$(PYTHON) -m tools.fork.series apply $(or $(VLLM),$(error VLLM=path is missing)) $(ARGS)

.PHONY: fork-patches
fork-patches: ## Write the same as patches for `git am` into dist/
	@$(PYTHON) -m tools.fork.series patches $(ARGS)

.PHONY: fork-check
fork-check: install ## vLLM's own hooks and our unit tests on forks of three releases
	@$(INSTALL) --vllm 0.31.0 --vllm 0.32.0 --vllm 0.33.0
	@$(PY) -m tools.fork.check

.PHONY: upstream
upstream: install ## The same, and vLLM's own NIXL suites, stock and ours
	@$(INSTALL) --vllm 0.31.0 --vllm 0.32.0 --vllm 0.33.0
	@$(PY) -m tools.fork.check --suites

.PHONY: lock
lock: ## Resolve requirements/*.in anew with uv
	@for name in build cpu-lab test lab; do \
	  $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 \
	    --no-annotate --no-emit-package torch --no-emit-package triton \
	    --override requirements/override.in \
	    --custom-compile-command "make lock" \
	    requirements/$$name.in --output-file requirements/$$name.txt; \
	done

.PHONY: clean
clean: ## Remove the environment and every cache
	@rm -rf .venv .cache build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
