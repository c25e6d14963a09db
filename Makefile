# Everything runs in .venv, which `make setup` creates; see README.md.
# `make study CORPUS=wikiqa SEEDS=5` passes its variables on to `kdnotes study --notebook` as KDNOTES_MAKE_CORPUS, ...
# in the environment, so a value is never part of a command. `kdnotes study --help` describes them; P='alpha=.3 epochs=2'
# are parameters of a run (`kdnotes parameters`), INIT and GRADIENT_STATS two of them, and SMOKE=1 is a quick test.
PYTHON ?= python3
# processes of the tests
WORKERS ?= 2
SHELL := bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\#.*/\1/p' $(MAKEFILE_LIST))

# make expands a $ in the value of a variable, unless the value is assigned as it is
GIVEN := $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name)))
$(foreach name,$(GIVEN),$(eval override export $(name) := $$(value $(name))))
given = $(if $(filter $(1),$(GIVEN)),$($(1)))
override P := $(strip $(call given,P) $(patsubst %,student_init=%,$(call given,INIT)) $(patsubst %,gradient_stats=%,$(call given,GRADIENT_STATS)))
PASSED := $(filter-out PYTHON KDNOTES_% P INIT GRADIENT_STATS,$(GIVEN)) $(if $(P),P)
$(foreach name,$(PASSED),$(eval study tune search report bench scaling doctor: export KDNOTES_MAKE_$(patsubst TUNED_%,%,$(name)) := $$($(name))))
export KDNOTES_DATA ?= $(abspath $(wildcard ../shared/data))
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export WORKERS SHARE MODULE SAMPLE
# IPython mixes in the packages of VIRTUAL_ENV; COLUMNS is the width of a terminal
unexport VIRTUAL_ENV COLUMNS

help:  ## print this list
	@sed -n 's/^\([a-z-]*\): *.*## /  make \1\t/p' $(MAKEFILE_LIST)
setup: .venv/.setup-done  ## create the virtual environment .venv with all dependencies: a few minutes, once
.venv/.setup-done: pyproject.toml constraints.txt constraints-cuda.txt
	tools/setup.sh $(PYTHON) && touch $@
constraints:  ## update constraints.txt and constraints-cuda.txt: keeps versions, adds new dependencies and hashes; ARGS=--upgrade or ARGS='--upgrade-package numpy'
	python tools/constraints.py $(ARGS)
audit: setup  ## check all pinned versions for known vulnerabilities; if the database does not answer, print a warning, or fail with ARGS=--required
	@python tools/audit.py $(ARGS)

study: setup  ## train and compare the arms: TASK= CORPUS=embedded COLUMNS='text=review,label=stars' SEEDS=3 ARMS=usual GRID='temperature=2,4' TRANSFER= INIT= PROFILE= STUDY= JOBS= RAY= P='alpha=.3 ...' SMOKE=1
	@kdnotes study --notebook
tune: setup  ## tune one arm by a search: MODE=baseline TRIALS=6 JOBS=1 TUNED_SEEDS=0, and TASK, CORPUS, COLUMNS, TRANSFER, INIT, PROFILE, STUDY, P as for study
	@kdnotes tune --notebook
search: setup  ## search for students on the Pareto front of quality and size: TRIALS=40 WORKERS=1 SPACE=student OBJECTIVES=score,params SAMPLER=tpe MODE=mixed_kd RAY=, and TASK, CORPUS, ... as for study
	@kdnotes search --notebook
report: setup  ## write the report of a study, HTML and PDF: STUDY=embedded
	kdnotes report -- "$${KDNOTES_MAKE_STUDY:-embedded}"
bench: setup  ## compare kdnotes with other libraries on this machine, 40 minutes: CONTESTANTS=all|race|quality|inference|scaling|scoring|names ALTERNATIONS=5 STEPS=50
	@kdnotes bench --notebook
scaling: setup  ## measure the cost of synchronising ranks and fit a model of step time, 30 minutes: TURNS=5
	@kdnotes scaling --notebook
doctor: setup  ## check all modes on this machine in a minute; for your own model: kdnotes doctor -p teacher=<folder> ...
	@kdnotes doctor
gpu-check:  ## check a GPU machine in ten minutes: correctness, memory, speed, energy; uses PYTHON without setup; to try it, ARGS='--device cpu --smoke'
	@$(PYTHON) -m bench.gpu_check $(ARGS)

test test-all test-rest check fuzz mutation: export OMP_NUM_THREADS = 1
test test-all test-rest check fuzz mutation: export OMP_WAIT_POLICY = passive
NOTEBOOKS = nbdev_test --n_workers "$$WORKERS" && nbdev_test --path bench/nbs --n_workers "$$WORKERS"
# a file's tests stay together, in the order of tests/conftest.py, and share their fixtures
PYTEST = pytest -n "$$WORKERS" --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5
test: lint  ## run every notebook, and one test of each kind: a quarter of an hour
	$(NOTEBOOKS) && $(PYTEST) -m 'not exhaustive'
test-all: setup  ## run every notebook and every test, with all kills, mutants, rehearsals and 10,000 malformed inputs: half an hour more
	$(NOTEBOOKS) && KDNOTES_FUZZ=10000 $(PYTEST)
test-rest: setup  ## run the tests that `make test` skips, or a share of them: SHARE=2/5
	$(PYTEST) -m exhaustive $${SHARE:+--share "$$SHARE"}
lint: setup  ## check format and code with ruff
	ruff format --check && ruff check
check: lint  ## check a staged change before its commit: modules equal notebooks, notebooks are clean, the tests that train nothing pass
	nbdev_export && python tools/export_bench.py
	@git diff --exit-code --stat -- kdnotes bench || { echo 'the export changed modules: look at it, stage it, try again'; exit 1; }
	$(NOTEBOOKS)
	@jupyter nbconvert --log-level=ERROR --clear-output --inplace $(filter-out nbs/index.ipynb,$(wildcard nbs/[a-z]*.ipynb))  # their outputs contain sentences of a corpus
	nbdev_clean && nbdev_clean --fname bench/nbs
	@git diff --exit-code --stat -- nbs bench || { echo 'a notebook differs from what is staged: look at it, stage it, try again'; exit 1; }
	$(PYTEST) -m 'not slow and not exhaustive'
fuzz: setup  ## test with 10,000 malformed corpora, configurations, records and checkpoints, new ones each time
	KDNOTES_FUZZ=10000 pytest tests/test_fuzz.py
mutation: setup  ## mutation testing: change the code in small ways and count the changes that quick tests detect: MODULE=train.loop SAMPLE=150
	python tests/mutation.py --module "$$MODULE" --sample "$${SAMPLE:-0}"
thesis: setup  ## build the values, the figures and thesis/thesis.pdf from the committed evidence: offline, in a minute, byte for byte reproducible
	python -m thesis
docs: setup  ## build the docs site in _docs/ from notebooks, modules and evidence: offline, in two minutes
	@python -m docs
lab: setup  ## start JupyterLab
	jupyter lab
lessons: setup  ## execute the lessons in nbs/lessons and store their outputs: ten minutes
	@jupyter nbconvert --log-level=ERROR --KernelManager.transport=ipc --to notebook --execute --inplace nbs/lessons/*.ipynb && nbdev_clean --fname nbs/lessons
readme: setup  ## generate README.md from nbs/index.ipynb
	jupyter nbconvert --to notebook --execute --inplace nbs/index.ipynb && nbdev_clean --fname nbs/index.ipynb && python tools/readme.py
clean:  ## remove .venv and caches; keep runs/
	rm -rf .venv kdnotes.egg-info .pytest_cache _docs _proc mutants
	find kdnotes bench nbs tests tools -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
