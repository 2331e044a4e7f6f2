# Two commands: `make demo` installs and runs the main job, `make test` installs and runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo setup test lint calibrate-cpu clean

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

test: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .

# One core of this machine as a device, about 5 minutes; goes on where it was interrupted.
calibrate-cpu: $(VENV)/.installed-test
	mkdir -p out
	OMP_NUM_THREADS=1 $(BIN)/infersim calibrate device --device cpu --out out/cpu.yaml \
	  $(if $(wildcard out/cpu.yaml),--force)

clean:
	rm -rf $(VENV)
