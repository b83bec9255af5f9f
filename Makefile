# Every task of a developer. `make env` needs only python3 (3.10 to 3.12) and make.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
RUN_TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PATHS := mcore tools examples tests benchmarks $(wildcard pretrain_gpt.py)

.PHONY: help env demo checks style lint types arch docs test test-full test-gpu bench-cpu schedule

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

env: $(STAMP) ## .venv with the pinned packages and mcore itself

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
		{ echo "mcore is tested on Python 3.10 to 3.12; this is $$($(PYTHON) --version)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the packages of constraints.txt into .venv (a minute or two)"
	$(BIN)/python -m pip install -qq -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -qq --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

demo: env ## from text to a trained, resumed, generating GPT: about 5 minutes on 2 cores
	$(BIN)/python -m examples.demo.run

checks: style lint types arch ## all that needs no training: format, lint, types, architecture

style: env
	$(BIN)/ruff format --check $(PATHS)

lint: env
	$(BIN)/ruff check $(PATHS)
	$(BIN)/codespell $(PATHS) docs *.md Makefile

types: env
	$(BIN)/mypy $(PATHS)

arch: env ## floors, cycles, globals, who may touch what; the generated pages
	$(BIN)/python -m pytest -q tests/unit/test_architecture.py tests/unit/tools/test_flags_page.py

docs: env ## write the generated pages
	$(BIN)/python -m tools.flags_page docs/flags.md

test: env ## the test suite, under 15 minutes on 2 cores; the architecture's own tests are among the checks
	$(RUN_TESTS) -n 2 --dist loadscope --no-loadscope-reorder -m 'not full and not gpu' --ignore tests/unit/test_architecture.py

test-full: env ## every layout of every matrix
	$(RUN_TESTS) -m 'not gpu'

test-gpu: env ## what needs CUDA
	$(RUN_TESTS) -m gpu

bench-cpu: env ## tokens per second; see benchmarks/README.md
	$(BIN)/python benchmarks/training/run.py
	$(BIN)/python benchmarks/pipeline/run.py

# make schedule P=4 M=8 V=2
P ?= 4
M ?= 8
V ?= 1
schedule: env ## print a pipeline schedule: make schedule P=4 M=8 V=2
	$(BIN)/mcore schedule --pp $(P) --microbatches $(M) --vpp $(V)
