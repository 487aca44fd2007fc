# From a bare checkout: `make train` and `make test` each do all the set-up they need, in .venv, with Python 3.11, 3.12 or 3.13.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-ci test-long test-slow test-pythons test-all test-faults fleet-tools test-deploy test-deploy-quick test-slurm test-fleet clean FORCE

VENV := .venv
RUN := $(VENV)/bin/python
PIP_INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check
# Many tests wait for other processes: one more at a time than there are cores.
PYTEST := PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu $(RUN) -m pytest -n $(shell expr 1 + $$(nproc)) --dist loadfile --no-loadscope-reorder
# Unit tests compile many small programs and run each a few times, so XLA optimizes as little as it can. Those of bits, of
# speed and of whole processes, which are elsewhere, have the flags that users have.
QUICK_XLA := XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true \
    --xla_cpu_use_fusion_emitters=false"
TRAIN_REQUIREMENTS := $(if $(GPU),requirements-gpu,requirements)

help:
	@echo "make train             train on Pong with the CPU, about 20 minutes; first sets up .venv (about 2 minutes)"
	@echo "make train GPU=1       with JAX for NVIDIA GPUs (driver 580 or newer), in five minutes"
	@echo "make train ARGS='...'  ARGS go to main.py, such as ARGS='--config configs/atari.yaml seed=3'; ARGS=--help lists all"
	@echo "make test              style, types and tests, 3 minutes on 2 cores; first sets up .venv"
	@echo "make test-ci           the longer tests that .ci/run has beside make test: a run, a resume, kills, simulated fleets"
	@echo "make test-all          all tests but those of deploy/, in about an hour: make test, test-long, and test-slow (minutes each)"
	@echo "make test-pythons      make train ARGS='--config catch processes=many' with each of Python 3.11, 3.12 and 3.13 that is here"
	@echo "make test-pythons PYTHONS=3.13   with that one"
	@echo "make test-faults       every fault of docs/faults.md, slow ones included"
	@echo "make test-faults FAULT=31   those of one number, of two digits"
	@echo "make fleet-tools       sets up .venv with the Python packages for the commands of deploy/terraform/README.md"
	@echo "make test-deploy       tests of deploy/: Terraform against moto, units, scripts; needs terraform"
	@echo "make test-deploy-quick its part that takes minutes only: no moto, no installation"
	@echo "make test-deploy-quick NO_TERRAFORM=1   what of that needs no terraform: scripts, units, manifests"
	@echo "make test-slurm        a fleet as a job of a real Slurm; needs root, slurm-wlm and munge, or tests less"
	@echo "make test-fleet        the roles of a fleet as its user data starts them, in namespaces; needs terraform and root"
	@echo "make clean             remove .venv and the tools' caches; runs/ stays"
	@echo "Add PYTHON=/path/to/python3 to choose the interpreter that .venv is made with."

# exec: Ctrl-C and SIGTERM reach main.py itself, with no shell in between.
train: $(VENV)/$(TRAIN_REQUIREMENTS).installed
	@exec $(RUN) main.py $(if $(GPU),$(if $(filter --%,$(ARGS)),,--config atari)) $(or $(ARGS),$(if $(GPU),run_directory=runs/Pong-v5-gpu total_minutes=5))

test: $(VENV)/requirements-dev.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	@echo "$(RUN) -m mypy, beside pytest"
	@$(RUN) -m mypy & types=$$!; \
	    $(QUICK_XLA) $(PYTEST) tests/unit; units=$$?; \
	    $(PYTEST) tests deploy/tests --ignore=tests/unit; others=$$?; \
	    wait $$types && exit $$((units | others))

test-ci: $(VENV)/requirements-dev.installed
	$(PYTEST) -m 'ci and not long and not slow and not deploy'

test-long: $(VENV)/requirements-dev.installed
	$(PYTEST) -m '(ci or long) and not slow and not deploy'

# Two at a time: they hold real processes to real seconds. Those that learn to a score need the cores for themselves.
test-slow: $(VENV)/requirements-dev.installed
	$(PYTEST) -n 2 -m 'slow and not deploy' --ignore=tests/system/test_learning.py
	$(RUN) -m pytest -m slow tests/system/test_learning.py

# On a machine without graphics libraries; make test-slow has the rest of this file.
test-pythons: $(VENV)/requirements-dev.installed
	$(RUN) -m pytest -m slow -k 'catch$(if $(PYTHONS), and $(PYTHONS))' tests/system/test_bare_machine.py

test-all: test test-long test-slow

# Every test that is named after a fault of docs/faults.md, in whatever file.
test-faults: $(VENV)/requirements-dev.installed
	JAX_PLATFORMS=cpu $(RUN) -m pytest -m "not deploy" -k test_fault_$(FAULT)

fleet-tools: $(VENV)/requirements.installed $(VENV)/requirements-host.installed

test-deploy: $(VENV)/requirements-deploy.installed
	JAX_PLATFORMS=cpu $(RUN) -m pytest -m 'deploy and not slow'

test-deploy-quick: $(VENV)/requirements-deploy.installed
	@echo "Not in here, but in make test-deploy: apply and destroy against moto; what runs on hosts; provision.sh"
	JAX_PLATFORMS=cpu $(RUN) -m pytest -m 'deploy and quick$(if $(NO_TERRAFORM), and not terraform)'

# As root: nodes are namespaces. Part of test-deploy, too.
test-slurm: $(VENV)/requirements-deploy.installed
	JAX_PLATFORMS=cpu $(RUN) -m pytest -m deploy deploy/tests/test_slurm.py

# As root: hosts are namespaces.
test-fleet: $(VENV)/requirements-deploy.installed
	JAX_PLATFORMS=cpu $(RUN) -m pytest -m 'deploy and slow'

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A checkout films its games and copies its runs to S3; somebody who comes by pip chooses.
EXTRAS := requirements-video.txt requirements-storage.txt

# A stamp is written last, so what was interrupted is done again, and a changed requirements file is installed anew.
$(VENV)/%.installed: %.txt requirements.txt $(EXTRAS) $(VENV)/created
	@echo "Installing $< into $(VENV): about a minute ..."
	@$(PIP_INSTALL) -r $< $(addprefix -r ,$(EXTRAS))
	@touch $@

$(VENV)/requirements-host.installed: deploy/requirements-host.txt $(VENV)/requirements.installed
	@$(PIP_INSTALL) -r $<
	@touch $@

# gymnax without what it depends on, which would keep Gymnasium and JAX back.
$(VENV)/requirements-dev.installed: requirements-dev.txt requirements.txt requirements-export.txt requirements-box2d.txt requirements-jax-envs.txt $(EXTRAS) $(VENV)/created
	@echo "Installing $< into $(VENV): about a minute ..."
	@$(PIP_INSTALL) -r $<
	@$(PIP_INSTALL) --no-deps -r requirements-jax-envs.txt
	@touch $@

$(VENV)/requirements-deploy.installed: requirements-dev.txt requirements-export.txt deploy/requirements-host.txt

# Rebuilt also where it is there but does not work: half made, or made with a Python that has gone.
WORKS := $(shell $(RUN) -c 'import pip' 2>/dev/null && echo yes)

$(VENV)/created: $(if $(WORKS),,FORCE)
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11); do \
	    "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || continue; \
	    "$$python" -c 'import ensurepip, venv' 2>/dev/null || { \
	        echo "error: $$python has no venv module: install it (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	    echo "Making $(VENV) with $$("$$python" --version) ..."; \
	    rm -rf $(VENV); "$$python" -m venv $(VENV) && touch $@; exit; \
	done; \
	echo "error: $(or $(PYTHON),python3) is not Python 3.11, 3.12 or 3.13: install one, or give its path: make PYTHON=/path/to/python3" >&2; \
	exit 1

FORCE:
