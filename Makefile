# make demo      set up, then stock against patched on a small real model and on one larger than the caches
# make test      set up, then the tests; make test-all adds the long statistical and random programmes
# make check     lint, types and all tests; .ci/run does lint, types and make test in a fresh virtual environment
# make sanitize  the C++ kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer
# make families  stock against patched for each model class of transformers' auto mappings; writes docs/support.md
# make mutants   one wrong line after the other, each of which the tests must find (ONLY=attention: some of them)
# make soak      ten minutes of many clients of the server: answers, blocks, threads and memory
# make clients   the server's clients of other packages (litellm, langchain, dspy, ...), in an environment of their own
# make wheel     dist/*.whl, which needs no compiler to install, for every Python 3 of this platform
# make wheels    dist/*.whl for Linux on x86-64 and ARM, macOS on ARM and Windows, by one compiler; runs what can be run here
# make docs      a site of README.md and docs/, in build/site
# make bench     the measurements behind benchmarks/results
# make gpu       what needs an NVIDIA GPU, by PYTHON as it is, in at most ten minutes: tests and measurements
# TORCH=2.11 (or 2.15, ...) after any of them takes that torch, in a virtual environment of its own; so does TRANSFORMERS.
PYTHON ?= python3
VENV ?= .venv$(TORCH:%=-torch-%)$(TRANSFORMERS:%=-transformers-%)
RUN = $(VENV)/bin/python
PYTEST = $(RUN) -m pytest --numprocesses logical --maxprocesses 8 --dist worksteal
KERNELS = hf_accel/kernels/cpu
SOURCES = $(KERNELS)/build.py $(shell find $(KERNELS)/src -name '*.cpp' -o -name '*.h')

# Wheels and .ci/run compile for all CPUs, all else for this one: half of the files, if it has no AVX-512.
export HF_ACCEL_LEVELS ?= native
wheel wheels: export HF_ACCEL_LEVELS = all

# Tests and the many processes that they start read what the first of them has compiled, also on a machine whose
# environment says that Python should write no bytecode: that is a third of the time to collect the tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all lint types check sanitize families mutants soak clients wheel wheels docs bench gpu clean

demo: $(VENV)/.ready
	$(RUN) examples/quickstart.py

test: $(VENV)/.ready
	$(PYTEST)

test-all: $(VENV)/.ready
	$(PYTEST) -m "long or not long"

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.ready
	$(RUN) -m mypy

check: lint types test-all

SANITIZED = build/libhf_accel_cpu_sanitized.so
sanitize: $(VENV)/.ready
	CXX=$(CXX) $(RUN) hf_accel/kernels/cpu/build.py $(SANITIZED) --sanitize
	HF_ACCEL_LIBRARY=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	$(RUN) -m pytest tests/unit/kernels

# What was run for this code stands in build/families and is not run again.
families: $(VENV)/.ready
	status=0; $(RUN) -m tests.families.run --all --resume --shard 1/2 & \
	$(RUN) -m tests.families.run --all --resume --shard 2/2 || status=1; \
	wait $$! || status=1; $(RUN) -m tests.families.report && exit $$status

mutants: $(VENV)/.ready
	$(RUN) -m tests.mutants.run $(ONLY)

soak: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(RUN) -m tests.serving.soak

# They need other packages than ours do, and see ours behind their own.
CLIENTS = litellm mcp instructor "pydantic-ai-slim[openai]" langchain-openai dspy guidellm
clients: $(VENV)/.ready
	$(PYTHON) -m venv build/clients
	$(RUN) -c "import site; print(site.getsitepackages()[0])" > build/behind.txt
	cp build/behind.txt $$(build/clients/bin/python -c "import site; print(site.getsitepackages()[0])")/zz_behind.pth
	build/clients/bin/python -m pip install --quiet --disable-pip-version-check $(CLIENTS)
	OMP_NUM_THREADS=1 PYTHONPATH=. build/clients/bin/python -m pytest tests/serving/test_clients.py -n 0 -rs -W default

# By the compiler of this machine, for it. macOS needs no repair.
wheel: $(VENV)/.ready
	rm -rf build/wheel
	$(RUN) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .
	if [ "$$(uname)" != Linux ]; then mkdir -p dist && cp build/wheel/*.whl dist; else \
		PATH="$(abspath $(VENV))/bin:$$PATH" $(RUN) -m auditwheel repair --only-plat \
		--wheel-dir dist build/wheel/*.whl; fi

wheels: $(VENV)/.ready
	$(RUN) -m pip install --quiet --disable-pip-version-check "ziglang>=0.14"
	$(RUN) -m release.wheels $(TARGETS)

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "build/site/index.html; $(RUN) -m mkdocs serve shows the site while it is written"

bench: $(VENV)/.ready
	$(RUN) -m benchmarks.run

gpu:
	$(PYTHON) -m benchmarks.gpu

# What pip compiled is compiled again after a change to the C++; where it found no compiler there is nothing to do.
$(VENV)/.ready: $(VENV)/.installed $(SOURCES)
	@grep -qs "no compiler" $(KERNELS)/not_built.txt \
		|| test -z "$$(find $(SOURCES) -newer $(KERNELS)/libhf_accel_cpu.so 2>&1)" \
		|| $(RUN) $(KERNELS)/build.py
	@touch $@

$(VENV)/.installed: pyproject.toml setup.py constraints-dev.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or later is needed: make PYTHON=python3.11')"
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[dev]" \
		$(if $(TORCH),"torch==$(TORCH).*",--constraint constraints-dev.txt) $(TRANSFORMERS:%="transformers==%.*")
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info $(KERNELS)/libhf_accel_cpu.so $(KERNELS)/not_built.txt .pytest_cache .ruff_cache .mypy_cache
