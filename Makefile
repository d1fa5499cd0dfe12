# Shards & Bubbles. `make` alone lists the commands. Everything is installed into .venv, and only there.

PYTHON ?= $(or $(shell for p in python3.11 python3; do $$p -c "" 2>/dev/null && echo $$p && break; done),python3)
PY := .venv/bin/python
LESSON := notebooks/00_start_here.ipynb
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=/path/to/python3.11 before or after any of them chooses another Python."

# ---- for learners

.PHONY: lab
lab: .venv/course ## set up the course and open it in JupyterLab
	$(PY) -m jupyterlab --ServerApp.root_dir=. --LabApp.default_url=/lab/tree/$(LESSON) \
	  $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: selfcheck
selfcheck: .venv/course ## say what works on this machine, and what to do about the rest
	$(PY) -m lessons_lib selfcheck

# ---- for authors

.PHONY: test
test: .venv/tests ## set up and run the tests
	$(PY) -m pytest -n 2 --dist loadfile

.PHONY: check
check: lint types layers lessons exercises slow oracles browser ## everything else: lint, types, layers, lessons, exercises, slow tests

.PHONY: lint types layers lessons exercises slow oracles browser
lint: .venv/tests ## the code is clean (ruff)
	$(PY) -m ruff check .
types: .venv/tests ## the types are right (mypy)
	$(PY) -m mypy
layers: .venv/tests ## a module imports only from the layers below it (import-linter)
	.venv/bin/lint-imports --no-logo --no-cache
lessons: .venv/tests ## no lesson is stale; every cell runs, and every section alone
	$(PY) notebooks/build.py --check
exercises: .venv/tests ## solved, each gives all its points, unsolved none; nothing leaks; no orphan in the course's data
	$(PY) exercises/build.py --check
	$(PY) notebooks/tables.py --check
slow: .venv/tests ## tests that start processes for seconds
	$(PY) -m pytest -n 2 --dist loadfile -m slow tests
oracles: .venv/tests ## what torch builds on ranks gives the serial gradients (the alarm for a torch upgrade)
	$(PY) -m pytest -n 2 --dist loadfile -m oracle tests/oracles
browser: .venv/tests ## every lesson runs in a real JupyterLab, without an error
	$(PY) -m pytest -n 2 --dist load -m browser tests/browser

.PHONY: notebooks
notebooks: .venv/tests ## execute the stale lessons anew (all: make notebooks BUILD=--force); exercises and tables, too
	$(PY) notebooks/build.py $(BUILD)
	$(PY) exercises/build.py
	$(PY) notebooks/tables.py

.PHONY: bench
bench: .venv/tests ## measure how long a launch takes
	$(PY) -m tests.bench

# ---- the environment, made once and again when its list changes

.venv/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "The course needs Python 3.11 or newer, and \"$(PYTHON)\" is not that." >&2; \
	  echo "Install it from https://www.python.org/downloads/ or your package manager" >&2; \
	  echo "(Debian, Ubuntu: apt install python3.11-venv; macOS: brew install python@3.11)," >&2; \
	  echo "or say where it is: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -m venv .venv || { rm -rf .venv; \
	  echo "Python could not make .venv. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

.venv/course: requirements.txt pyproject.toml | .venv/bin/python
	@echo "Installing the course into .venv, once; this takes a few minutes ..."
	@$(PY) -m pip install --quiet -r requirements.txt
	@touch $@

.venv/tests: tests/requirements.txt .venv/course
	@echo "Installing what tests and checks need ..."
	@$(PY) -m pip install --quiet -r tests/requirements.txt
	@$(PY) -m jupyterlab.labextensions disable @jupyter/nbgrader --level=sys_prefix 2>/dev/null  # its menus
	@touch $@
