# Each sets up what it needs: `make report` shows a plan, `make demo` runs the main job, `make test` passes every check.
# Four tiers of tests (tests/tools/tiers.py): `make check` in a minute, `make test` in nine, `make all` (every case) in three
# hours; `make pairs` is less than all: of large products of models and layouts it runs covering arrays.
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
BIN := .venv/bin
PLANS := .venv/plans
READY := .venv/ready
CONSTRAINTS ?= constraints.txt
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
export OMP_NUM_THREADS ?= 1
# Tests start many processes, and each would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE
# lint, types and drawn run side by side
MAKEFLAGS += --jobs=2

SHOWN := gpt2.html
TYPED := planner passes runtime specs

.PHONY: report demo check test pairs all lint types drawn changed_types bench clean

# Where there is a screen the page opens in the browser.
report: $(PLANS)
	$(BIN)/meshwright plan hf:examples/gpt2_small.json specs/tp2_pp2.yaml --format html -o $(SHOWN)
	@echo "open $(SHOWN) in a browser"
	@if [ -n "$$DISPLAY$$WAYLAND_DISPLAY" ] || [ "$$(uname)" = Darwin ]; then \
		$(BIN)/python -m webbrowser "file://$(CURDIR)/$(SHOWN)" >/dev/null; fi

demo: $(READY)
	$(BIN)/python examples/train_gpt2.py

# Two files at a time: the tests of a file share what they start, and ranks that wait leave their core to the other file.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile

check: lint changed_types
	$(PYTEST) --tier check

test: lint types drawn
	$(PYTEST) --tier test --durations=250 --durations-min=3

# Beside the type checker, which takes as long on the other core.
drawn: $(READY)
	$(BIN)/python -m tests.fuzz --minutes 1 --seed 1000

pairs: lint types
	$(PYTEST) --tier pairs --durations=60 --durations-min=5
	$(BIN)/python -m tests.fuzz --minutes 5 --seed 2000

all: lint types
	$(PYTEST) --tier all --durations=60 --durations-min=5
	$(BIN)/python -m tests.fuzz --minutes 10 --seed 2000

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.tools.words

types: $(READY)
	$(BIN)/basedpyright

# Of files that differ from the branch that work began on, or from the last commit where git knows no such branch.
changed_types: $(READY)
	@base=$$(git merge-base HEAD origin/main 2>/dev/null || echo HEAD); \
	changed=$$(git diff --name-only --diff-filter=d $$base -- $(TYPED) | grep '\.py$$'); \
	if [ -n "$$changed" ]; then $(BIN)/basedpyright $$changed; fi

bench: $(READY)
	$(BIN)/python benchmarks/run.py
	$(BIN)/python benchmarks/planning.py

$(PLANS): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(INSTALL) -e '.[hf]'
	@touch $@

$(READY): $(PLANS)
	$(INSTALL) -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv $(SHOWN) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
