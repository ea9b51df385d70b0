# One command a need, on a laptop and in CI alike. Everything runs in .venv, which the first command makes.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
SERVE ?=
GPU ?=
RECORDED_S ?= 600
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SGLANG_VENV ?= .venv-sglang
SGLANG_INSTALLED := $(SGLANG_VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_INSTALLED := $(VLLM_VENV)/.installed
.DEFAULT_GOAL := help
.PHONY: help install demo test docs lint types unit load unit-and-load registered left-out nightly browser picture pages soak attack odd recorded ray clients sglang vllm bench gpu serve clean

# Tests and servers share the machine's cores: more threads a process would only take time from each other. No test asks
# a model hub for anything: the checkpoints that tests need, they make.
demo unit load unit-and-load registered nightly browser picture pages soak attack odd recorded ray bench: export OMP_NUM_THREADS = 1
unit load unit-and-load registered nightly soak attack odd recorded ray: export HF_HUB_OFFLINE = 1

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / /' | awk '{ name = $$1; $$1 = ""; printf "make %-11s%s\n", name, $$0 }'

install: $(INSTALLED) ## the engine and its tools, in .venv, in the versions that were tested

demo: $(INSTALLED) ## the flush race on four real stage processes: the bug, the engine, a timeline to look at
	@$(BIN)/scripted demo

test: lint types unit-and-load registered left-out ## everything that a pull request must pass

lint: $(INSTALLED) ## style, and the registrations of the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m ci check

types: $(INSTALLED) ## mypy --strict over the product, ci and benchmarks
	$(BIN)/mypy --num-workers $(WORKERS)

# In the order of folders: in xdist's own, files of few tests come last, and those of few tests take longest.
unit: $(INSTALLED) ## the unit tests
	$(BIN)/python -m pytest tests/unit -q --vet off -n $(WORKERS) --dist loadfile --no-loadscope-reorder

load: $(INSTALLED) ## real servers under disturbed clients and under attack, every invariant checked, for seconds
	$(BIN)/python -m pytest tests/load -q --vet off -n $(WORKERS) --dist loadfile

# Both in one run of pytest: its workers import torch once, and no core waits for the last file of a run. One worker
# more than elsewhere: many of these tests wait for a process or a deadline, and left a fifth of two cores idle.
unit-and-load: $(INSTALLED)
	$(BIN)/python -m pytest tests/load tests/unit tests/browser -q --vet off -m "not nightly" -n $$(($(WORKERS) + 1)) --dist loadfile --no-loadscope-reorder

nightly: $(INSTALLED) ## the tests that repeat those of `make test` with more cases, or for longer
	$(BIN)/python -m pytest tests/load tests/unit tests/registered -q --vet off -m nightly -n $(WORKERS) --dist loadfile

left-out: $(INSTALLED)
	@$(BIN)/python tests/browser/browser_installed.py

browser: $(INSTALLED) ## the timeline and the debugger in a real browser; installs what they need
	$(call get,$(BIN),$(BROWSER))
	$(BIN)/python tests/browser/browser_installed.py --install
	$(BIN)/python -m pytest tests/browser -q --vet off

picture: $(INSTALLED) ## README's picture of the timeline, made again; needs what `make browser` installs
	$(BIN)/python tests/browser/browser_pictures.py

pages: $(INSTALLED) ## the tutorials followed word for word, and every install line of the pages run
	$(BIN)/python -m pytest tests/pages -q --vet off
	tests/packaging.sh

soak: $(INSTALLED) ## the same for minutes, with 64 clients, and with a stage killed
	$(BIN)/python tests/load/load.py --clients 64 --seconds 60 --stages 1 4
	$(BIN)/python tests/load/load.py --clients 64 --seconds 6 --stages 1 4 --kill

attack: $(INSTALLED) ## bad, large, slow and leaving clients, web pages, kills and a soak, for minutes, on loopback
	$(BIN)/python tests/load/attack.py

odd: $(INSTALLED) ## chance requests, right, wrong and damaged, to servers of seven configurations, each answer judged
	$(BIN)/python tests/load/odd_client.py

recorded: $(INSTALLED) ## the same load for ten minutes, or RECORDED_S seconds, recorded and replayed
	mkdir -p out
	$(BIN)/python tests/load/load.py --clients 64 --seconds $(RECORDED_S) --stages 1 --record out/load.rec
	$(BIN)/scripted replay out/load.rec

registered: $(INSTALLED) ## the registered tests, in both tiers; CI runs those of the night as well
	$(BIN)/python -m ci suite --hw cpu --suite base-cpu --continue-on-error -- -m "not nightly" -n $(WORKERS) --dist loadgroup

ray: $(INSTALLED) ## what Ray places, on local clusters: stages, whole engines, and a load with parts of it killed and cut
	$(BIN)/python -m ci suite --hw cpu --suite ray-cpu --timeout-per-file 2400 --continue-on-error -- --placement ray --tier server
	$(BIN)/python tests/load/cluster.py --clients 64 --seconds 60 --scenes slow actor cut node

clients: $(INSTALLED) ## the programs that people bring, each in an environment of its own, in .venv-clients
	$(BIN)/python tests/clients/programs.py

sglang: $(SGLANG_INSTALLED) ## SGLang's own scheduler under the search, in an environment of its own, .venv-sglang
	$(SGLANG_VENV)/bin/python -m ci suite --hw cpu --suite sglang-cpu --continue-on-error

vllm: $(VLLM_INSTALLED) ## vLLM's own scheduler under the search, in an environment of its own, .venv-vllm
	$(VLLM_VENV)/bin/python -m ci suite --hw cpu --suite vllm-cpu --continue-on-error

docs: $(INSTALLED) ## the documentation as a site, in out/site
	$(call get,$(BIN),$(DOCS))
	$(BIN)/mkdocs build --strict --site-dir out/site

bench: $(INSTALLED) ## performance: steps a second, server boot, scripts a second, the cost of the gate
	$(BIN)/python -m benchmarks

gpu: $(INSTALLED) ## what only a GPU can say: parity, attention, graphs, a peer; GPU="--dry-run" passes flags on
	$(BIN)/python -m benchmarks.gpu $(GPU)

serve: $(INSTALLED) ## an engine on http://127.0.0.1:30000; SERVE="--pp-size 4" passes flags on
	$(BIN)/engine serve $(SERVE)

clean: ## remove .venv, caches and results
	rm -rf $(VENV) $(SGLANG_VENV) $(VLLM_VENV) .venv-clients out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# BIN, and what goes there: uv installs in a fifth of pip's time, with what pip's environment says of indexes. It reads none
# of pip's files, so where only these say how packages are reached, pip does it. What setuptools leaves beside the
# packages lists all their files, and pytest would rewrite the assertions of each.
PIP := -m pip install --quiet --disable-pip-version-check
UV := --quiet --system-certs $(if $(PIP_INDEX_URL),--default-index $(PIP_INDEX_URL)) $(addprefix --index ,$(PIP_EXTRA_INDEX_URL))
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
TESTED := --constraint constraints.txt --editable '.[serve,test]'
VLLM := --editable '.[serve,vllm]'
BROWSER := --constraint constraints.txt --editable '.[serve,test,browser]'
DOCS := --constraint constraints.txt --editable '.[docs]'
define get
$(1)/python $(PIP) --constraint constraints.txt uv
$(1)/uv pip install --python $(1)/python $(UV) $(2) || $(1)/python $(PIP) --no-compile $(2)
rm -rf lockstep_engine.egg-info
endef

# Made again when what is installed changes; an interrupted installation leaves no stamp. Modules are compiled when they
# are first imported: of the 17,000 that are installed few ever are. What was compiled is kept, or every process of the
# tests would compile torch again.
unexport PYTHONDONTWRITEBYTECODE
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is %d.%d; set PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call get,$(BIN),$(TESTED))
	@touch $@

# SGLang states 80 packages, most of them for GPUs: it comes without them, and with those that its scheduler
# imports.
$(SGLANG_INSTALLED): pyproject.toml constraints.txt adapters/scripted_sglang/requirements.txt
	test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[serve,sglang]'
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement adapters/scripted_sglang/requirements.txt
	@touch $@

# vLLM states its own versions. It brings libraries for pictures and sound that its scheduler does not need, and that a
# build of torch for the CPU cannot load.
$(VLLM_INSTALLED): pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(call get,$(VLLM_VENV)/bin,$(VLLM))
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
