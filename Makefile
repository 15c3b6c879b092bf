# Everything a newcomer needs is `make demo` and `make test`; each sets up .venv by itself and may be repeated at will.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal
export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE # tests start a hundred interpreters, and each would compile everything again

.DEFAULT_GOAL := help
.PHONY: help install demo test test-all lint types unit unit-all soak docs package pictures screenshots bench bench-compare bench-crowd bench-gpu bench-peers bench-schedulers test-integrations test-on-ray test-trainers test-integrations-long test-browser clean

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## create .venv and install the project with its development tools (idempotent)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "stream_balancer needs Python 3.11 or newer; try make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: install  ## watch real processes train the same rollouts, first round-robin, then balanced
	$(BIN)/stream-balancer demo $(ARGS)

test: lint  ## ruff, the strict type checker, the tests: every promise once, in minutes
	$(MAKE) --no-print-directory -j2 types unit # tests wait for processes half of the time

test-all: lint  ## the same with the slow tests, which CI runs
	$(MAKE) --no-print-directory -j2 types unit-all

unit-all: install
	$(PYTEST) -m "not soak and not browser" --hypothesis-profile thorough $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

unit: install
	$(PYTEST) $(ARGS)

LONG := --timeout 3000 -o faulthandler_timeout=3060
IF_NONE_CHOSEN = $(if $(ARGS),|| test $$? = 5) # by a path or a -k, of one half

soak: install  ## the long drills: kill tests, fuzzing, property tests on many examples
	$(PYTEST) -m "hypothesis and not soak and not browser" --hypothesis-profile long $(LONG) $(ARGS) $(IF_NONE_CHOSEN)
	$(BIN)/python -m pytest -m soak $(LONG) $(ARGS) $(IF_NONE_CHOSEN)

bench: install  ## every benchmark that needs nothing but the project
	for file in engine partition plan_time plan_quality default_cost window sizes micro_batches training transport connect way_of_a_put failures beside_training journal tune scale certify; do \
		test ! -e bench/$$file.py || { echo "== bench/$$file.py"; $(BIN)/python bench/$$file.py $(ARGS) || exit 1; }; \
	done

bench-compare: install  ## today beside another commit, alternating: COMMIT=... FILES="bench/engine.py" ARGS="--rounds 3"
	for file in $(or $(FILES),bench/engine.py bench/connect.py bench/transport.py); do \
		echo "== $$file"; $(BIN)/python bench/compare.py $(COMMIT) $$file $(ARGS) || exit 1; \
	done

bench-crowd: install  ## 512 ranks and 10,000 producers on one controller, over real sockets
	ulimit -n 16384; $(BIN)/python bench/crowd.py --results bench/results/crowd.jsonl $(ARGS)

bench-gpu: install  ## what one accelerator can measure, in under eight minutes; first the tests that need one
	$(BIN)/python -m pytest -m accelerator tests/unit/test_device.py
	$(BIN)/python bench/accelerator.py $(ARGS)

# torch is large: the environments beside .venv take .venv's files of it, and nothing else that is there. A folder of links,
# which a .pth file names; pip finds torch installed. What pip would compile and nobody imports stays as it is: --no-compile.
TORCH := $(VENV)/torch-alone
TAKE_TORCH = for site in $(1)/lib/python3*/site-packages; do echo "$(CURDIR)/$(TORCH)" > $$site/torch.pth; done
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

$(TORCH): $(STAMP)
	rm -rf $@
	mkdir $@
	cd $@ && ln -s $(foreach name,torch torchgen functorch torch-*.dist-info,../lib/python3*/site-packages/$(name)) .

PEERS := .venv-peers/bin/python

.venv-peers/.installed: bench/peers-deps.txt bench/peers.txt | $(TORCH)
	test -x $(PEERS) || $(PYTHON) -m venv .venv-peers
	$(call TAKE_TORCH,.venv-peers)
	$(PEERS) $(PIP_INSTALL) -c constraints.txt -r bench/peers-deps.txt
	$(PEERS) $(PIP_INSTALL) --no-deps -r bench/peers.txt
	touch $@

.venv-peers/.bench-installed: bench/peers-bench.txt .venv-peers/.installed
	$(PEERS) $(PIP_INSTALL) -c constraints.txt -r bench/peers-bench.txt
	touch $@

bench-peers: .venv-peers/.bench-installed  ## the planning benchmarks beside verl, AReaL and others, in an environment of their own
	for file in partition window micro_batches verl_drop_in training; do \
		echo "== bench/$$file.py"; PYTHONPATH=. $(PEERS) bench/$$file.py $(ARGS) || exit 1; \
	done

bench-schedulers: .venv-peers/.installed  ## trainers' schedulers side by side, their real code; ARGS="--traces DIR --schedulers FILE --page FILE"
	PYTHONPATH=. $(PEERS) bench/schedulers.py --results bench/results/schedulers.jsonl $(ARGS)

TEST_PEERS := PYTHONPATH=. STREAM_BALANCER_REQUIRE_PEERS=1 $(PEERS) -m pytest

test-integrations: .venv-peers/.installed  ## the adapters against real trainers' packages, in the same environment
	$(MAKE) --no-print-directory -j2 test-on-ray test-trainers # one waits for its cluster, the other imports trainers

test-on-ray: .venv-peers/.installed
	$(TEST_PEERS) tests/integrations/test_ray*.py $(ARGS) $(IF_NONE_CHOSEN)

test-trainers: .venv-peers/.installed
	$(TEST_PEERS) tests/integrations --ignore-glob='*/test_ray*.py' $(ARGS) $(IF_NONE_CHOSEN)

test-integrations-long:  ## ... and the longer of them
	$(MAKE) --no-print-directory test-integrations ARGS='-m "not soak" $(ARGS)'

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[docs,browser]'
	touch $@

docs: $(VENV)/.docs-installed  ## the documentation site, into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

test-browser: $(VENV)/.docs-installed  ## tune's page and the dashboard in headless Chromium; skipped by name where there is none
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

EMPTY := $(VENV)/empty

package: $(TORCH)  ## sdist and wheel into dist/; the wheel is tried in an empty environment, with the README's program
	rm -rf dist $(EMPTY)
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv $(EMPTY)
	$(EMPTY)/bin/python $(PIP_INSTALL) numpy
	$(EMPTY)/bin/python $(PIP_INSTALL) --no-deps dist/*.whl # planning needs numpy only
	sed '1,/^```python$$/d;/^```$$/,$$d' docs/planning.md > $(EMPTY)/planning.py
	cd $(EMPTY) && PYTHONPATH= bin/python planning.py
	$(call TAKE_TORCH,$(EMPTY))
	$(EMPTY)/bin/python $(PIP_INSTALL) torch==2.13.0 dist/*.whl
	cd $(EMPTY) && bin/stream-balancer --version && bin/python -m stream_balancer replay generate:lrm:2000 --dp-size 4 --batch-size 16
	sed -n '/^```python$$/,/^```$$/{//!p}' README.md > $(EMPTY)/readme.py
	cd $(EMPTY) && PYTHONPATH= bin/python readme.py

pictures: $(VENV)/.docs-installed  ## draw docs/pictures/ anew, from the library and from bench/results/
	$(BIN)/python docs/_site/pictures.py

screenshots: $(VENV)/.docs-installed  ## picture tune, status and the dashboard anew, in three minutes; needs Chromium and Prometheus
	$(BIN)/python docs/_site/screenshots.py

clean:  ## remove .venv and caches
	rm -rf $(VENV) .venv-peers site .mypy_cache .ruff_cache .pytest_cache .hypothesis
