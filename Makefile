# Each target installs what it needs into .venv first; nothing has to be there but Python 3.11+.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

# The first Python that is new enough and can make environments.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	if $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)
BIN := .venv/bin
STAMP := .venv/installed
TREES := fxpart passes costmodels tests examples setup.py

.PHONY: help test tests long times quick search lint format typecheck demo bench gpu chaos pages docs clean
help:  ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

# torch comes first and alone, so that a CPU build that the machine offers is taken. pip would compile
# files one after the other; some are templates that nobody can compile.
$(STAMP): pyproject.toml setup.py constraints.txt
	@test -n "$(PYTHON)" || { echo "fxpart needs Python 3.11 or newer: make PYTHON=..." >&2; exit 4; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[train,test,models,integrations,metrics]'
	$(BIN)/python -m compileall -qq -j 0 .venv/lib || true
	@touch $@

# Two workers that take whole files, so that what a file captures or starts is kept for all its tests;
# in the order of tests/support/long_tests.py.
WORKERS := --numprocesses 2 --dist loadfile --no-loadscope-reorder

# One thread for each worker; compiled test files are kept for the next run, whatever the shell says.
QUIET := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

# Types are checked beside the tests: mypy has one core for a minute.
test: lint  ## what has to pass: lint, types, all tests but the longest
	$(MAKE) --no-print-directory --jobs 2 typecheck tests

tests: $(STAMP)
	$(QUIET) $(BIN)/python -m pytest -q $(WORKERS) --durations=25 -m "not long"

long: $(STAMP)  ## the tests that `make test` leaves out; PART=2/10 runs a part of them
	$(QUIET) PART=$(PART) $(BIN)/python -m pytest -q $(WORKERS) --durations=25 -m long

times: $(STAMP)  ## write anew which tests `make test` leaves out, from the time that each takes
	mkdir -p build
	$(QUIET) $(BIN)/python -m pytest -q $(WORKERS) --junitxml=build/times.xml -m "not long"
	$(BIN)/python -m pytest -q --collect-only tests > build/cases.txt
	$(BIN)/python tests/support/long_tests.py build/times.xml build/cases.txt

quick: $(STAMP)  ## the fast tests, under a minute
	$(QUIET) $(BIN)/python -m pytest -q $(WORKERS) -m "not slow and not long"

search: $(STAMP)  ## the property tests on random examples instead of the fixed ones
	$(QUIET) $(BIN)/python -m pytest -q $(WORKERS) \
		--hypothesis-profile search --timeout 1800 $$(grep -rl hypothesis tests --include 'test_*.py')

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check $(TREES)
	$(BIN)/ruff format --check $(TREES)

format: $(STAMP)  ## let ruff write the format
	$(BIN)/ruff format $(TREES)
	$(BIN)/ruff check --fix $(TREES)

# mypy looks for fxpart.passes inside fxpart/: a tree of links shows it what is installed.
typecheck: $(STAMP)  ## mypy --strict
	rm -rf build/typecheck
	mkdir -p build/typecheck/fxpart
	ln -s $(CURDIR)/fxpart/* $(CURDIR)/passes $(CURDIR)/costmodels build/typecheck/fxpart/
	cd build/typecheck && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml \
		--cache-dir $(CURDIR)/.mypy_cache --package fxpart \
		| sed -E 's,^build/typecheck/,,; s,^fxpart/(passes|costmodels)/,\1/,'

DEMO := examples/gpt2_text.py:workload
OUT := demo-out
demo: $(STAMP)  ## plan, train and verify a small GPT-2 on 4 local processes
	mkdir -p $(OUT)
	$(BIN)/fxpart plan $(DEMO) --cluster local:4 --fix stages=4 -o $(OUT)/plan.json
	$(BIN)/fxpart train $(DEMO) --plan $(OUT)/plan.json --nproc 4 --steps 40 --lr 0.001
	$(BIN)/fxpart verify $(DEMO) --plan $(OUT)/plan.json
	$(BIN)/fxpart export $(DEMO) --plan $(OUT)/plan.json -o $(OUT)/program
	$(BIN)/fxpart report $(OUT)/plan.json -o $(OUT)/report.html
	@printf '%s\n' '' 'What there is now:' \
		'  $(OUT)/plan.json    every decision, its cost and its proof: fxpart explain $(OUT)/plan.json' \
		'  $(OUT)/program/     the Python that each rank runs, its actions, a manifest with digests' \
		'  $(OUT)/report.html  timeline, memory, stages: open it in a browser'

# The last one writes tables and outputs of README and pages from what the others kept.
BENCHMARKS := module_check overhead split_backward recording pipelining gloo_threads asynchronous slow_links predicting stalebench/measured stalebench/run saving recovery elastic events overlap local_transfers tensor_overhead zero data_parallel compiled_stages propagation_speed placement pipeline_speed large_models experts spaces planner joint maxload_optima baselines startup communication accuracy profiling choice memory memory_layouts heterogeneous heterogeneous_measured heterogeneous_tables prefetched_rows queued compatibility readme
bench: $(STAMP)  ## every figure that the README quotes
	for name in $(BENCHMARKS); do echo "== $$name"; \
		$(QUIET) $(BIN)/python tests/benchmarks/$$name.py --date "$$(date +%F)"; done

gpu:  ## check numbers, times and memory on the GPU of this machine, with the Python that is active
	$${GPU_PYTHON:-python3} tests/gpu/check.py

chaos: $(STAMP)  ## long runs: kill -9 and restarts by the hundred, 20,000 steps, random schedules and plans, fuzzed files
	for name in transfers soak equality kills launcher_kills starts restarts saving_killed faults schedules_checked laws fuzz; do echo "== $$name"; \
		$(QUIET) $(BIN)/python tests/benchmarks/$$name.py --date "$$(date +%F)"; done

PAGES := notebooks schedule_pages cluster_pages asynchronous_pages delayed_quadratic api_pages document_pictures
pages: $(STAMP)  ## write all generated parts of README, pages and pictures again
	for name in $(PAGES); do $(QUIET) $(BIN)/python tests/support/$$name.py; done
	cd tests/support && $(QUIET) $(CURDIR)/$(BIN)/python -m supported.page
	$(QUIET) $(BIN)/python tests/benchmarks/readme.py
	$(QUIET) $(BIN)/python tests/benchmarks/stalebench/run.py --page

# The site needs packages that nothing else does.
docs: $(STAMP)  ## the documentation as a site: build/site/index.html
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

clean:  ## remove what the targets made, the environment too
	rm -rf .venv build dist demo-out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
