# Every target sets up .venv by itself; only Python >= 3.11 and make must be there.
#   make demo [BACKEND=zarr] [STEPS=40] [ARGS='--checkpoints s3://bucket/demo']   make lint   make clean
#   make test [ARGS='-k tree']       each test function once, nothing is killed
#   make test-all [ARGS='-k tree']   everything
#   make test-megatron                Megatron's own models, with its checkpoints and with ours
#   make test-s3                      object stores on a real S3 server (Ceph, which it starts)
#   make test-azure                   the same on Azurite, a mock of Azure
#   make test-trainers                the Trainer of transformers, Accelerate, Lightning
#   make examples [ARGS='chaos']      every example, small: a line for each
#   make chaos [ARGS='--kills 200']   make chaos ARGS='--store s3://bucket/chaos'
#   make simulate [ARGS='--seed 7']  trainings in a simulated world; ARGS='--histories 20000'
#   make bench [ARGS='--only small-tensors']   make bench-planning   make docs
#   make size                         how much code there is, and how much should be
PYTHON ?= python3
BACKEND ?=
STEPS ?=
ARGS ?=
# Tests of a file share what they set up, so they stay in one process; WORKERS= runs all in one. One process
# more than cores, because many tests wait; in order, so that no slow file comes last.
WORKERS ?= -n $(shell getconf _NPROCESSORS_ONLN | awk '{print ($$1 < 4 ? $$1 + 1 : 4)}') --dist loadfile \
  --no-loadscope-reorder

BIN := .venv/bin
READY := .venv/ready
DEMO_READY := .venv/demo-ready
DOCS_READY := .venv/docs-ready
# Each in a folder of its own: what imports megatron.core elsewhere finds none.
MEGATRON := .venv/megatron-core
MEGATRON_VERSIONS := 0.15.3 0.16.1 0.19.2
# A venv of its own on top of .venv: what these packages bring with them stays out of it.
TRAINERS := .venv/trainers
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)

.PHONY: demo test test-all test-megatron test-s3 test-azure test-trainers examples lint size bench \
  bench-planning chaos simulate docs clean
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	@PYTHON=$(PYTHON) .ci/set-up dev
	@touch $@

# The demo needs less, unless there is all of it already.
$(DEMO_READY): pyproject.toml constraints.txt
	@{ test $(READY) -nt pyproject.toml && test $(READY) -nt constraints.txt; } || \
	  PYTHON=$(PYTHON) .ci/set-up demo
	@touch $@

# Apart, so that no other target waits for what only the site needs; and without the package itself, which
# programs that run may be importing.
$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $$($(BIN)/python -c \
	  'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

demo: $(DEMO_READY)
	@$(BIN)/python examples/reshard_gpt.py $(if $(BACKEND),--backend $(BACKEND)) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -q --once-each $(WORKERS) $(ARGS)

test-all: $(READY)
	$(BIN)/python -m pytest -q $(WORKERS) $(ARGS)

# megatron-core names an older numpy than it needs, so what it depends on is .venv's. Since 0.17 it names
# Python 3.12, and works with 3.11.
$(MEGATRON)/%: $(READY)
	rm -rf $@
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --target $@ \
	  --ignore-requires-python megatron-core==$* $$(grep '^psutil==' constraints.txt)

test-megatron: $(READY) $(MEGATRON_VERSIONS:%=$(MEGATRON)/%)
	MEGATRON_CORE=$(subst $(SPACE),:,$(MEGATRON_VERSIONS:%=$(MEGATRON)/%)) \
	  $(BIN)/python -m pytest -q tests/megatron $(ARGS)

# Without Debian's radosgw, ceph-mon and ceph-osd, and without root, it says so and skips.
test-s3: $(READY)
	TEST_STORE=ceph $(BIN)/python -m pytest -q tests/s3 $(ARGS)

# Without azurite-blob (npm install azurite) on the PATH, it says so and skips.
test-azure: $(READY)
	TEST_STORE=azurite $(BIN)/python -m pytest -q tests/s3 $(ARGS)

$(TRAINERS)/ready: $(READY) constraints.txt
	rm -rf $(TRAINERS)
	$(BIN)/python -m venv $(TRAINERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > $$($(TRAINERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth
	$(TRAINERS)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt \
	  accelerate lightning transformers
	@touch $@

test-trainers: $(TRAINERS)/ready
	PYTHONPATH="$(CURDIR)" $(TRAINERS)/bin/python -m pytest -q tests/trainers $(ARGS)

examples: $(TRAINERS)/ready
	PYTHONPATH="$(CURDIR)" $(TRAINERS)/bin/python examples/run_all.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

size: $(READY)
	$(BIN)/python docs/tools/size.py

bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(ARGS)

bench-planning: $(READY)
	$(BIN)/python benchmarks/bench.py --planning $(ARGS)

simulate: $(READY)
	@$(BIN)/python tests/simulation/simulate.py $(ARGS)

chaos: $(READY)
	$(BIN)/python examples/chaos.py $(ARGS)

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open $(CURDIR)/site/index.html"

clean:
	rm -rf .venv bench-output demo-output build site dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
