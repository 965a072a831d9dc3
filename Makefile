# make quickstart   set up .venv and run the main job on this machine
# make check        format, lint, types, unit and golden tests (under 2 minutes once set up)
# make test         check, and integration, faults, a real Slurm, SGLang, vLLM, atroposlib and MPI: what CI runs
# make gpu          tests/gpu and the benchmark of the engines on a GPU of this machine: unattended, some minutes
# make rows         the test of every `works` row of the parameters with that option disconnected: it must fail
# make docs         the docs as a site, in ./site
# make bench        this project beside its peers (15 minutes); writes docs/performance.md and benchmarks/results
# make soak         what is too long for every landing
# make slow         make test on a machine that is made slower: each process gets a third of a core (about 1 h; root)
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests pin PyTorch's CPU build; on a GPU machine: make TORCH='torch>=2.9'
TORCH ?= torch==2.13.0
# processes that run tests; those with a Slurm share two of them, those with a SGLang or a vLLM one (tests/conftest.py)
WORKERS ?= 3
# the same, of tests that mostly wait: for Slurm, for servers, for processes of a trial
WAITING_WORKERS ?= 4
# unit tests that start many processes or wait for time limits
WAITING_UNIT_TESTS := $(shell grep -lr --include=*.py "mark.waits" tests/unit)
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1
# a missing Slurm, SGLang, vLLM, atroposlib, MPI or shellcheck fails instead of skipping
export HPC_RL_TEST_REQUIRE ?= slurm,sglang,vllm,atropos,mpi,shellcheck

.PHONY: quickstart setup format check test gpu rows docs bench soak slow clean

quickstart: $(VENV)/train
	$(BIN)/hpc-rl quickstart

setup: $(VENV)/dev

$(VENV)/train: pyproject.toml
	@echo "setting up $(VENV): PyTorch, transformers and hpc-rl (some minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[train]'
	@touch $@

$(VENV)/dev: $(VENV)/train pyproject.toml
	@echo "adding what the tests need"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[train,megatron,dev]'
	@touch $@

format: $(VENV)/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(VENV)/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@# mypy has one core while pytest starts
	$(BIN)/mypy & types=$$!; $(BIN)/python -m pytest -q -n $(WORKERS) -m "not soak and not waits" tests/unit tests/golden; tests=$$?; \
	wait $$types && exit $$tests

test: check
	$(BIN)/python tests/slurm/packages.py
	tests/sglang/install.sh
	tests/vllm/install.sh
	tests/atropos/install.sh
	tests/mpi/install.sh
	$(BIN)/python -m pytest -n $(WAITING_WORKERS) --dist loadscope --no-loadscope-reorder \
		tests/slurm tests/sglang tests/vllm tests/atropos tests/mpi tests/integration tests/faults tests/rows tests/gpu \
		$(WAITING_UNIT_TESTS) -m "not soak" --durations 40

gpu: $(VENV)/dev
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'there is no GPU that PyTorch can use here'"
	$(BIN)/python -m pytest -q tests/gpu
	$(BIN)/python benchmarks/engines.py --device cuda --compiled --out benchmarks/results/engines_gpu.json
	$(BIN)/python benchmarks/loss_memory.py --device cuda --out benchmarks/results/loss_memory_gpu.json

rows: $(VENV)/dev
	$(BIN)/python tests/rows/bite.py

docs: $(VENV)/dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(VENV)/dev
	tests/atropos/install.sh
	$(BIN)/python benchmarks/side_by_side/run.py --page docs/performance.md

soak: $(VENV)/dev
	$(BIN)/python tests/slurm/packages.py
	tests/sglang/install.sh
	tests/vllm/install.sh
	tests/atropos/install.sh
	tests/mpi/install.sh
	$(BIN)/python -m pytest tests -m soak --timeout 7200

slow: $(VENV)/dev
	$(BIN)/python tests/slow_machine.py --share 0.333 $(MAKE) test

clean:
	rm -rf $(VENV) .venv-sglang .venv-vllm .venv-atropos .venv-trl .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
