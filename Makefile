# Two commands: `make demo` installs and runs the main job, `make test` installs and runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo setup test test-slow fuzz explore conformance live record lint pictures performance profiles calibrate-cpu clean

demo: setup
	$(BIN)/infersim run llama-8b-h100

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/.installed-slow: $(VENV)/.installed-test  # a sweep on a Ray cluster of two nodes is among them
	$(BIN)/python -m pip install --quiet --editable '.[test,ray]'
	touch $@

test: lint
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(VENV)/.installed-slow
	$(BIN)/python -m pytest -m slow

MINUTES ?= 5
fuzz: $(VENV)/.installed-test  # random scenarios over every key of the schema, on all cores
	$(BIN)/python tests/fuzz/scenarios.py $(MINUTES)

explore: $(VENV)/.installed-test  # new random examples for the property tests, which else draw the same ones every time
	$(BIN)/python tests/fuzz/explore.py $(MINUTES)

# an engine's own scheduler against ours: make conformance RELEASE=0.32 (vLLM) or sglang-0.5.23; 3 GB in .conformance
VLLM ?= 0.32
RELEASE ?= $(VLLM)
ENGINE = $(if $(findstring sglang,$(RELEASE)),sglang,vllm)
NUMBER ?= 20
conformance: $(VENV)/.installed-test .conformance/$(RELEASE)/.installed
	$(BIN)/python tests/conformance/referee.py .conformance/$(RELEASE) $(NUMBER)

# a real vLLM on one core, calibrated and predicted, about 20 minutes; Linux, two cores, the less else runs the better
live: $(VENV)/.installed-test .conformance/$(RELEASE)/.server
	$(BIN)/python tests/live/live.py cpu out/live .conformance/$(RELEASE)

.conformance/%/.server: .conformance/%/.installed
	sh tests/live/install.sh $*

record: $(VENV)/.installed-test .conformance/$(RELEASE)/.installed  # decisions for make test: make record RELEASE=0.33 NUMBER=2
	$(BIN)/python tests/conformance/scenarios.py $(ENGINE) 1 $(NUMBER) | PYTHONPATH=.conformance/$(RELEASE) \
	  .conformance/python/bin/python tests/conformance/$(ENGINE)_scheduler.py | gzip -9n \
	  > tests/conformance/decisions/$(if $(findstring vllm,$(ENGINE)),vllm-)$(RELEASE).jsonl.gz

.conformance/%/.installed:
	sh tests/conformance/install.sh $*

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

pictures: $(VENV)/.installed-test  # of the studio, in reports/; needs chromium
	$(BIN)/python tests/pictures.py

# reports/performance.md, against another checkout: make performance AGAINST=../infersim-old
performance: $(VENV)/.installed-test
	$(BIN)/python tests/benchmarks/performance.py --against $(AGAINST) $(if $(TRACE),--trace $(TRACE))

# The calibrated hardware profiles, from a folder of measured kernels: make profiles DATA=../shared/data/kernels
AICONFIGURATOR := ai-dynamo/aiconfigurator, Apache-2.0, (c) NVIDIA, modified
SERVINGSIM := casys-kaist/LLMServingSim, MIT, layers of vLLM 0.19 in place, modified
calibrate = $(BIN)/infersim calibrate kernels $(2) --hardware $(1) --out hardware_profiles/$(1).yaml --force --source

profiles: setup
	for name in h100-sxm h200-sxm a100-sxm-80gb b200-sxm l40s; do \
	  $(call calibrate,$$name,$(DATA)) "$(AICONFIGURATOR)" || exit 1; done
	$(call calibrate,rtx-pro-6000,$(DATA)/nccl.parquet $(DATA)/custom_allreduce.parquet) "$(AICONFIGURATOR)"
	for name in rtx-pro-6000 rtx-4090; do \
	  $(call calibrate,$$name,$(DATA)/vllm019_dense_us.csv $(DATA)/vllm019_per_sequence_us.csv \
	    $(DATA)/vllm019_attention_us.csv) "$(SERVINGSIM)" || exit 1; done

# One core of this machine as a device, about 5 minutes; goes on where it was interrupted.
calibrate-cpu: $(VENV)/.installed-test
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/infersim calibrate device --device cpu --out out/cpu.yaml \
	  $(if $(wildcard out/cpu.yaml),--force)

clean:
	rm -rf $(VENV)
