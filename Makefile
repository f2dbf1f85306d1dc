# Two commands do everything, set-up included: `make pretrain` and `make test`.

PYTHON ?= python3
RANKS ?= 2
VENV := .venv
BIN := $(VENV)/bin
KERNEL := $(wildcard megatron/core/optimizer/kernels/*.cpp megatron/core/optimizer/kernels/*.h)
TORCH := $(shell grep '^torch==' requirements/constraints.txt)
PIP_FLAGS := --quiet --disable-pip-version-check
# One thread a rank: ranks that share cores slow each other down otherwise.
RUN := OMP_NUM_THREADS=1
# Files of tests side by side: many tests wait, for a timeout, a disk or another rank. Each worker has pools of ranks of
# its own, and takes up to 5 GiB. In alphabetical order, since the functional tests take longest.
WORKERS ?= 2
PYTEST := -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# Where `make test-matrix` makes its environments.
MATRIX_DIR ?= .venv-matrix

.PHONY: help install data pretrain generate test test-fast test-all test-matrix test-docs docs bench report peers peer \
        gpu-check check format clean-runs clean

help:
	@echo "make pretrain   install, prepare the data, train a GPT on $(RANKS) ranks (go on where it stopped)"
	@echo "make generate   let the trained model write"
	@echo "make test       install, then run the tests"
	@echo "make test-fast  a few minutes' worth of them, from every package"
	@echo "make test-all   the tests, the wide matrices and the comparisons with other projects"
	@echo "make test-matrix  the fast tests with other versions of Python and torch (CUDA builds: 5 GB each)"
	@echo "make docs       build the site from docs/ and check its links"
	@echo "make test-docs  type the README's and the tutorial's commands in fresh clones, build the site"
	@echo "make bench      every benchmark, half an hour on an idle machine; ARGS=--quick: minutes"
	@echo "make report     draw the stored results, write their tables; ARGS=--check names what is stale"
	@echo "make peer       the tests that run other projects: megatron-core, accelerate, transformers, TRL, PEFT, Fabric"
	@echo "make peers      environments of all projects that tests and benchmarks run (DeepSpeed and torchao, too)"
	@echo "make check      lint, format, types, import layers"
	@echo "make gpu-check  suites and benchmarks on a GPU, in ten minutes (docs/gpu.md)"
	@echo "make clean-runs forget the training run; make clean: forget everything made here"

# torch first and by exact version: what depends on it then takes this build and pulls in no other.
$(VENV)/.installed: pyproject.toml setup.py requirements/constraints.txt $(KERNEL)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_FLAGS) $(TORCH)
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint requirements/constraints.txt --editable '.[dev]'
	touch $@

install: $(VENV)/.installed

# The real text: what every CPython ships in English and Python, with a tokenizer trained on it. A new installation or
# tool is no reason to make it anew: a run that is under way goes on with what it began with.
data/stdlib.jsonl: | $(VENV)/.installed
	mkdir -p data
	$(BIN)/python tools/build_stdlib_corpus.py --output $@

data/stdlib_text_document.idx: data/stdlib.jsonl | $(VENV)/.installed
	$(BIN)/python -m megatron_hybrid preprocess --input $< --json-keys text \
	    --output-prefix data/stdlib \
	    --train-tokenizer --vocab-size 4096 --tokenizer-type HuggingFaceTokenizer \
	    --tokenizer-model data/stdlib_tokenizer.json --append-eod --workers 2

data: install data/stdlib_text_document.idx

pretrain: data
	$(RUN) $(BIN)/python -m megatron_hybrid launch --standalone --nproc-per-node $(RANKS) \
	    pretrain_gpt.py --config examples/gpt_cpu.yaml

generate: pretrain
	$(BIN)/python -m megatron_hybrid generate --load runs/gpt_cpu

test: install
	$(RUN) $(BIN)/python $(PYTEST)

test-fast: install
	$(RUN) $(BIN)/python $(PYTEST) $(shell sed 's/\#.*//' tests/fast_tests.txt)

test-all: install peer
	$(RUN) $(BIN)/python $(PYTEST) -m 'not docs and not gpu'

# The other projects that this one is compared with, each in an environment of its own: they need other versions, and one
# has our import name. torch first, then the project, then what our package needs, for processes that import both.
PEERS := $(basename $(notdir $(wildcard requirements/peers/*.txt)))
PEER_PIP = .venv-peers/$*/bin/python -m pip install $(PIP_FLAGS)
PINNED := --constraint requirements/constraints.txt
OUR_NEEDS = sed -n '/^dependencies = \[/,/^\]/s/^ *"\(.*\)",$$/\1/p' pyproject.toml

.venv-peers/%/.installed: requirements/peers/%.txt requirements/constraints.txt
	test -x .venv-peers/$*/bin/python || $(PYTHON) -m venv .venv-peers/$*
	$(PEER_PIP) $(TORCH)
	$(if $(BUILD_NEEDS),$(PEER_PIP) $(PINNED) $(BUILD_NEEDS))
	$(PEER_PIP) $(PINNED) $(BUILD_FLAGS) --requirement $<
	$(OUR_NEEDS) > .venv-peers/$*/needs.txt
	$(PEER_PIP) $(PINNED) --requirement .venv-peers/$*/needs.txt
	touch $@

# DeepSpeed compiles its kernels as it is installed, so that no run waits for them, against the torch that is there: not in
# pip's isolated environment, and not from its cache, which would have a wheel without them.
DEEPSPEED := .venv-peers/deepspeed/.installed
$(DEEPSPEED): export DS_ACCELERATOR := cpu
$(DEEPSPEED): export DS_BUILD_CPU_ADAM := 1
$(DEEPSPEED): export DS_BUILD_SHM_COMM := 1
$(DEEPSPEED): BUILD_NEEDS := setuptools wheel ninja packaging py-cpuinfo psutil
$(DEEPSPEED): BUILD_FLAGS := --no-build-isolation --no-cache-dir

peers: $(PEERS:%=.venv-peers/%/.installed)

peer: install .venv-peers/megatron-core/.installed .venv-peers/trainers/.installed
	$(RUN) $(BIN)/python -m pytest -m peer

# An environment for each line of requirements/matrix.txt. ARGS: pairs like 3.12:2.13.0 in their place, --allow-missing.
test-matrix:
	$(RUN) $(PYTHON) tests/matrix.py --environments $(MATRIX_DIR) $(ARGS)

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint requirements/constraints.txt --editable '.[docs]'
	touch $@

# The variable silences an advertisement of mkdocs-material's.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "open site/index.html; with its search: $(BIN)/python -m http.server --directory site"

# Clones the last commit, and makes an environment for each page whose commands it types.
test-docs: $(VENV)/.installed-docs
	$(BIN)/python -m pytest -m docs

# Beside `make peers`: what has no environment is reported as not run.
bench: install
	$(BIN)/python -m benchmarks run $(ARGS)

report: install
	$(BIN)/python -m benchmarks report $(ARGS)

# Installs nothing: a machine with a GPU may have no network, and its own torch.
gpu-check:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m tools.gpu_check $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit_tests/test_import_layers.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean-runs:
	rm -rf runs

clean: clean-runs
	rm -rf data build site *.egg-info $(VENV) .venv-peers .venv-matrix .mypy_cache .ruff_cache .pytest_cache .hypothesis
