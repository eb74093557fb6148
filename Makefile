# Everything runs in .venv, which the first target that needs it makes: `make demo` and `make test`
# want nothing but Python 3.11 or later, make and git. PY=python3 uses an environment that is ready.

PYTHON ?= python3
DEMO_ARGS ?=
PYTEST_ARGS ?=
NOTEBOOKS ?= $(wildcard notebooks/*.ipynb)

comma := ,
# .venv/.has-test+notebooks: those extras are installed, as pyproject.toml stands now.
STAMP := .venv/.has-

ifdef PY
needs =
else
PY := .venv/bin/python
needs = $(STAMP)$(1)
endif

.PHONY: help demo test lint docs stress matrix gpu multigpu notebooks clean

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(call needs,demo) ## the same workflow with and without the plugin (DEMO_ARGS)
	@$(PY) -m dask gpuipc demo $(DEMO_ARGS)

test: $(call needs,test+notebooks) ## the test suite, no GPU wanted (PYTEST_ARGS)
	$(PY) -m pytest $(PYTEST_ARGS)

lint: $(STAMP)dev ## format, rules, types, floors, spelling
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/codespell

docs: $(call needs,docs) ## the site, into build/site; a warning is an error
	$(PY) -m sphinx -W --keep-going -q -a -E docs build/site

stress: $(call needs,test) ## the tests that take minutes
	$(PY) -m pytest -m "stress or matrix" $(PYTEST_ARGS)

matrix: $(call needs,test) ## the whole kill matrix, and its table in docs/
	$(PY) -m pytest -m matrix tests/test_kill_matrix.py --kill-matrix docs/kill-matrix.md $(PYTEST_ARGS)

gpu: $(call needs,test) ## the tests that need a GPU; PY=python3 where cupy is installed
	$(PY) -m pytest -m gpu tests $(PYTEST_ARGS)

multigpu: $(call needs,test) ## the tests that need two GPUs
	$(PY) -m pytest -m multigpu tests $(PYTEST_ARGS)

notebooks: $(call needs,notebooks) ## run the notebooks, in place
	PATH="$(dir $(PY)):$$PATH" $(PY) -m jupyter_core execute --inplace $(NOTEBOOKS)

clean: ## remove .venv and all that the tools left
	rm -rf .venv build dist docs/checkout .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# pip speaks on stderr, so that stdout is the demo's alone.
$(STAMP)%: pyproject.toml | .venv/bin/python
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[$(subst +,$(comma),$*)]" >&2
	@touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

.PRECIOUS: $(STAMP)%
