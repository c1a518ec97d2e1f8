# Every target sets up what it needs, from a bare python3 (3.11 or newer) on.
.PHONY: help tiny test test-slow lint format cpu gpu clean
.DEFAULT_GOAL := help

UV := $(shell command -v uv || echo .uv/bin/uv)
PYTHON := .venv/bin/python
ENGINE := $(if $(wildcard .venv/gpu),gpu,cpu)
ifeq ($(UV),.uv/bin/uv)
UV_READY := .uv/bin/uv
endif

help:
	@echo "make tiny   the whole chapter in miniature, on a CPU, in about five minutes"
	@echo "make test   the tests       make test-slow   those that run for minutes      make lint   ruff, basedpyright"
	@echo "make gpu    prepare this machine for the real run (then: python train.py)"

tiny: .venv/$(ENGINE)
	$(PYTHON) tiny.py

test: .venv/$(ENGINE)
	$(PYTHON) -m pytest -m "not slow"

test-slow: .venv/$(ENGINE)
	$(PYTHON) -m pytest -m slow

lint: .venv/$(ENGINE)
	$(PYTHON) -m ruff check
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m basedpyright

format: .venv/$(ENGINE)
	$(PYTHON) -m ruff format
	$(PYTHON) -m ruff check --fix

cpu: .venv/cpu
gpu: .venv/gpu

# One environment at a time: vLLM for CPUs and vLLM for GPUs are the same Python package.
.venv/cpu .venv/gpu: pyproject.toml $(UV_READY)
	$(UV) sync --quiet --python python3 --extra $(@F)
	rm -f .venv/cpu .venv/gpu
	touch $@

.uv/bin/uv:
	python3 -c "import sys; sys.exit(sys.version_info < (3, 11) and 'error: python3 must be 3.11 or newer')"
	python3 -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv

clean:
	rm -rf .venv .uv uv.lock
