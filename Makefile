# Everything goes through .venv, which `make setup` makes; see README.md.
PYTHON  ?= python3
# what `make study` trains: TASK answer_selection | text_classification | masked_lm | extractive_qa | sentence_pairs; CORPUS embedded | wikiqa | imdb | a folder | a hub id;
# COLUMNS which column of a folder's files holds what: 'text=review,label=stars'; ARMS usual | procedures | all | a,b,c; TRANSFER none | squad1: a corpus learnt first;
# INIT where a student starts; GRADIENT_STATS=n ranges of gradients every n steps; SMOKE=1 a few steps an arm; STUDY its name, else the corpus';
# GRID values that arms have one each of: GRID='learning_rate=1e-4,2e-4 temperature=2,4'; JOBS runs at the same time, whose times are not compared where they share a device; RAY the address of a Ray cluster that makes them; P any other parameters of a run, for study and tune: P='teacher=<folder> alpha=.3' (`kdnotes parameters` lists them)
TASK    ?= answer_selection
CORPUS  ?= embedded
SEEDS   ?= 3
ARMS    ?= usual
GRID    ?=
PROFILE ?= laptop
TRANSFER ?= none
INIT    ?= none
GRADIENT_STATS ?= 0
SMOKE   ?=
JOBS    ?=
RAY     ?=
# what `make tune` searches
MODE    ?= baseline
TRIALS  ?= 6
TUNED_SEEDS ?= 0
# what `make search` searches, besides TRIALS (40) and WORKERS (1)
SAMPLER ?= tpe
SPACE   ?= student
OBJECTIVES ?= score,params
RAY     ?=
# what `make bench` measures
CONTESTANTS  ?= all
ALTERNATIONS ?= 5
STEPS        ?= 50
# turns of each setting that `make scaling` measures
TURNS ?= 5
STUDY   ?=
P       ?=
SHORT   := $(filter-out 0 False false,$(SMOKE))
# mutants of which module, as train.loop, and how many of them; else all that pyproject.toml names
MODULE  ?=
SAMPLE  ?= 0
# processes of the tests, and which share of the rest `make test-rest` takes
WORKERS ?= 2
SHARE   ?=

SHELL := bash
.SHELLFLAGS := -o pipefail -c
# read before what follows, which makes them the Makefile's own
GIVEN_VARIABLES := $(foreach name,$(.VARIABLES),$(if $(filter command line,$(origin $(name))),$(name)))
# what is given means itself: make would expand a $ in it, and execute $(shell ...)
TEXTS := TASK CORPUS PROFILE TRANSFER INIT SMOKE JOBS RAY STUDY P SEEDS ARMS GRID GRADIENT_STATS MODE TRIALS TUNED_SEEDS SAMPLER SPACE OBJECTIVES CONTESTANTS \
    ALTERNATIONS STEPS WORKERS SHARE MODULE SAMPLE ARGS KDNOTES_HOME KDNOTES_DATA $(filter COLUMNS,$(GIVEN_VARIABLES))
$(foreach name,$(TEXTS),$(if $(filter undefined,$(origin $(name))),,$(eval override $(name) := $$(value $(name)))))
define LINE_BREAK


endef
$(foreach name,$(TEXTS),$(if $(findstring $(LINE_BREAK),$($(name))),$(error $(name) holds a line break; leave it out)))
RUNS := $(or $(KDNOTES_HOME),.)/runs
DONE := .venv/.setup-done
KDNOTES_DATA ?= $(abspath $(wildcard ../shared/data))
ifneq ($(KDNOTES_DATA),)
export KDNOTES_DATA
endif
export PATH := $(CURDIR)/.venv/bin:$(PATH)
unexport VIRTUAL_ENV  # IPython would mix in the packages of an environment named here
# set here, and not with ?=: the environment's COLUMNS is the width of a terminal
COLUMNS :=
unexport COLUMNS
# the files hold all that is needed, so nothing is resolved: what has no hash there is not installed
INSTALL := .venv/bin/python -m pip install --quiet --no-deps --require-hashes
pins = sed -nE '/^($(1))==/,/[^\\]$$/p' constraints.txt
# a text as one word of the shell; the name and the value of name=value, whose value may hold = too
quoted = '$(subst ','\'',$(1))'
name_of = $(firstword $(subst =, ,$(1)))
value_of = $(patsubst $(call name_of,$(1))=%,%,$(1))
# what a notebook was saved with plays no part: smoke is always given
# what a study is called; where its arms are given, once its plan has refused nothing
NAME = kdnotes name -p $(call quoted,task=$(TASK)) -p $(call quoted,corpus=$(CORPUS)) -p $(call quoted,study=$(STUDY)) $(SHORT:%=-p smoke=true) $(foreach p,$(P),-p $(call quoted,$(p)))
PLANNED = $(NAME) --seeds $(call quoted,$(SEEDS)) --arms $(call quoted,$(ARMS)) $(foreach g,$(GRID),--grid $(call quoted,$(g))) $(if $(COLUMNS),-p $(call quoted,columns=$(COLUMNS))) -p $(call quoted,profile=$(PROFILE)) \
    -p $(call quoted,transfer=$(TRANSFER)) -p $(call quoted,student_init=$(INIT)) -p $(call quoted,gradient_stats=$(GRADIENT_STATS))
GIVEN = -r task $(call quoted,$(TASK)) -r corpus $(call quoted,$(CORPUS)) $(if $(COLUMNS),-r columns $(call quoted,$(COLUMNS))) -r profile $(call quoted,$(PROFILE)) \
    -r transfer $(call quoted,$(TRANSFER)) -r student_init $(call quoted,$(INIT)) \
    -p smoke $(if $(SHORT),True,False) $(foreach p,$(P),-r $(call quoted,$(call name_of,$(p))) $(call quoted,$(call value_of,$(p))))
# lines that are dropped: papermill's for each cell and for parameters that are not in the notebook (which refuses unknown ones), and each kernel's warning about TCP on this machine
NOISE := '^((Executing|Ending) Cell |Passed unknown parameter: |\[IPKernelApp\] WARNING \| Kernel is running over TCP|\[IPKernelApp\] ERROR \| KeyboardInterrupt caught in kernel|<IPython\.core\.display\.)|^$$'

QUIET = grep --line-buffered -vE $(NOISE)
# a Ctrl-C ends papermill in the middle of a sentence, so the recipe says what it means
STOPPABLE = trap 'echo stopped: what is done is kept, and the same command makes the rest >&2; exit 75' INT;

# a variable that is given and that nothing reads is a mistake: make would not say so
RUN := TASK CORPUS COLUMNS PROFILE TRANSFER INIT SMOKE JOBS STUDY P
READ_study := $(RUN) RAY SEEDS ARMS GRID GRADIENT_STATS
READ_report := STUDY
READ_tune := $(RUN) MODE TRIALS TUNED_SEEDS
READ_search := $(RUN) MODE TRIALS WORKERS SAMPLER SPACE OBJECTIVES RAY
READ_bench := CONTESTANTS ALTERNATIONS STEPS SMOKE
READ_scaling := TURNS SMOKE
READ_test := WORKERS
READ_test-all := WORKERS
READ_test-rest := WORKERS SHARE
READ_check := WORKERS
READ_gpu-check := ARGS
READ_constraints := ARGS
READ_audit := ARGS
READ_mutation := MODULE SAMPLE
GOALS := $(or $(MAKECMDGOALS),help)
VARIABLES := $(sort $(foreach goal,$(GOALS),$(READ_$(goal)))) PYTHON KDNOTES_DATA KDNOTES_HOME
ifneq ($(filter-out $(VARIABLES),$(GIVEN_VARIABLES)),)
$(error `make $(GOALS)` has no variable $(firstword $(filter-out $(VARIABLES),$(GIVEN_VARIABLES))): it takes $(VARIABLES)$(if $(filter P,$(VARIABLES)),; a parameter of a run is given as P='name=value'))
endif

.DEFAULT_GOAL := help
.PHONY: help setup constraints audit study report tune search test test-all test-rest lint check fuzz mutation bench scaling doctor gpu-check thesis docs lab lessons readme clean

help:    ## print this list
	@sed -n 's/^\([a-z-]*\): *.*## /  make \1\t/p' $(MAKEFILE_LIST)

setup: $(DONE)  ## create the virtual environment .venv with all dependencies: a few minutes, once
$(DONE): pyproject.toml constraints.txt constraints-cuda.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make setup PYTHON=python3.11")'
	@echo 'installing into .venv: a few minutes, about 2.5 GB, 6 GB with CUDA'
	$(PYTHON) -m venv .venv
	@# first what installs and builds the rest: nothing is built by a tool without a hash
	$(call pins,pip|setuptools) | $(INSTALL) -r /dev/stdin
	@# which build of torch is a matter of pip's settings, so pip chooses; told the hashes at once, it would leave a folder's CPU build for the index's
	rm -rf .venv/torch
	.venv/bin/python -m pip download --quiet --no-deps --only-binary :all: --dest .venv/torch "$$($(call pins,torch) | sed -n 's/ .*//; 1p')"
	$(call pins,torch) | $(INSTALL) --no-index --find-links .venv/torch -r /dev/stdin
	rm -r .venv/torch
	$(INSTALL) --no-build-isolation -r constraints.txt
	@# a torch that is not a CPU build (2.13.0+cpu) needs CUDA's packages, on Linux
	if .venv/bin/python -c 'from importlib.metadata import version; exit("+cpu" in version("torch"))'; then $(INSTALL) -r constraints-cuda.txt; fi
	.venv/bin/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	.venv/bin/python -m pip check
	@touch $@

constraints:  ## update constraints.txt and constraints-cuda.txt: keeps versions, adds new dependencies and hashes; ARGS=--upgrade or ARGS='--upgrade-package numpy'
	python tools/constraints.py $(ARGS)

audit: setup  ## check all pinned versions for known vulnerabilities; if the database does not answer, print a warning, or fail with ARGS=--required
	@python tools/audit.py $(ARGS)

study: setup  ## train and compare the arms: TASK=answer_selection CORPUS=embedded COLUMNS='text=review,label=stars' SEEDS=3 ARMS=usual GRID='temperature=2,4' TRANSFER=none PROFILE=laptop STUDY=<corpus> JOBS=1 RAY=<address> P='alpha=.3 ...'; SMOKE=1 for a try
	@$(STOPPABLE) study=$$($(PLANNED)) && folder=$(call quoted,$(RUNS))/$$study && mkdir -p "$$folder" && echo "study $$study: its notebook, its table and its comparisons as numbers will be in $$folder/" && \
	papermill nbs/study.ipynb "$$folder/study.ipynb" --cwd . --no-progress-bar --log-output $(GIVEN) -r study "$$study" -p seeds $(call quoted,$(SEEDS)) -r arms $(call quoted,$(ARMS)) \
	    -p gradient_stats $(call quoted,$(GRADIENT_STATS)) $(if $(GRID),-r grid $(call quoted,$(GRID))) $(if $(RAY),-r ray_address $(call quoted,$(RAY))) $(if $(JOBS),-p jobs $(call quoted,$(JOBS))) < /dev/null 2>&1 | $(QUIET) >&2 && cat "$$folder/table.txt" && \
	echo "next: make report STUDY=$$study (HTML and PDF); kdnotes list $$study names the runs, for kdnotes predict and kdnotes export"

report: setup  ## write the report of a study, HTML and PDF: STUDY=embedded
	kdnotes report $(call quoted,$(or $(STUDY),embedded))

tune: setup   ## tune one arm by random search: MODE=baseline TRIALS=6 JOBS=1 TUNED_SEEDS=0, and TASK, CORPUS, COLUMNS, TRANSFER, INIT, PROFILE, STUDY, P as for study
	@$(STOPPABLE) study=$$($(NAME)) && folder=$(call quoted,$(RUNS))/$$study-tuning && mkdir -p "$$folder" && notebook="$$folder"/tune-$(call quoted,$(MODE)).ipynb && echo "search $$study-tuning: its output is kept in $$notebook" && \
	papermill nbs/tune.ipynb "$$notebook" --cwd . --no-progress-bar --log-output $(GIVEN) -r study "$$study" -r mode $(call quoted,$(MODE)) -p trials $(call quoted,$(TRIALS)) $(if $(JOBS),-p jobs $(call quoted,$(JOBS))) \
	    -p seeds $(call quoted,$(TUNED_SEEDS)) < /dev/null 2>&1 | $(QUIET) >&2

# of the two that other commands read as well, its own defaults
given_or = $(call quoted,$(if $(filter $(1),$(GIVEN_VARIABLES)),$($(1)),$(2)))
search: setup  ## search for students on the Pareto front of quality and size: TRIALS=40 WORKERS=1 SPACE=student OBJECTIVES=score,params SAMPLER=tpe MODE=mixed_kd RAY=, and TASK, CORPUS, COLUMNS, TRANSFER, PROFILE, STUDY, P as for study
	@$(STOPPABLE) study=$$($(NAME) --search) && folder=$(call quoted,$(RUNS))/$$study && mkdir -p "$$folder" && echo "search $$study: its notebook, its page and its trials as a table will be in $$folder/" && \
	papermill nbs/search.ipynb "$$folder/search.ipynb" --cwd . --no-progress-bar --log-output $(GIVEN) -r study "$$study" -r mode $(call given_or,MODE,mixed_kd) \
	    -p n_trials $(call given_or,TRIALS,40) -p workers $(call given_or,WORKERS,1) -r sampler $(call quoted,$(SAMPLER)) -r space $(call quoted,$(SPACE)) -r objectives $(call quoted,$(OBJECTIVES)) \
	    -r ray_address $(call quoted,$(RAY)) < /dev/null 2>&1 | $(QUIET) >&2

test test-all test-rest check fuzz mutation: export OMP_NUM_THREADS = 1
# threads of one process that wait for each other leave the cores to the other process
test test-all test-rest check fuzz mutation: export OMP_WAIT_POLICY = passive
# a file's tests stay together, in the order of tests/conftest.py: what they share is made once
PYTEST = pytest -n $(call quoted,$(WORKERS)) --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 5

test: lint   ## run every notebook, and one test of each kind: a quarter of an hour
	nbdev_test --n_workers $(call quoted,$(WORKERS))
	nbdev_test --path bench/nbs --n_workers $(call quoted,$(WORKERS))
	$(PYTEST) -m 'not exhaustive'

test-all: setup  ## run every notebook and every test, with all kills, mutants, rehearsals and 10,000 malformed inputs: half an hour more
	nbdev_test --n_workers $(call quoted,$(WORKERS))
	nbdev_test --path bench/nbs --n_workers $(call quoted,$(WORKERS))
	KDNOTES_FUZZ=10000 $(PYTEST)

test-rest: setup  ## run the tests that `make test` skips, or a share of them: SHARE=2/5
	$(PYTEST) -m exhaustive $(if $(SHARE),--share $(call quoted,$(SHARE)))

lint: setup  ## check format and code with ruff
	ruff format --check
	ruff check

check: lint  ## check a staged change before its commit: modules equal notebooks, notebooks are clean, the tests that train nothing pass
	nbdev_export && python tools/export_bench.py
	@git diff --exit-code --stat -- kdnotes bench || { echo 'the export changed modules: look at it, stage it, try again'; exit 1; }
	nbdev_test --n_workers $(call quoted,$(WORKERS))
	nbdev_test --path bench/nbs --n_workers $(call quoted,$(WORKERS))
	@jupyter nbconvert --log-level=ERROR --clear-output --inplace $(filter-out nbs/index.ipynb,$(wildcard nbs/[a-z]*.ipynb))  # their outputs hold sentences of a corpus
	nbdev_clean && nbdev_clean --fname bench/nbs
	@git diff --exit-code --stat -- nbs bench || { echo 'a notebook differs from what is staged: look at it, stage it, try again'; exit 1; }
	$(PYTEST) -m 'not slow and not exhaustive'

fuzz: setup   ## test with 10,000 malformed corpora, configurations, records and checkpoints, new ones each time
	KDNOTES_FUZZ=10000 pytest tests/test_fuzz.py

mutation: setup  ## mutation testing: change the code in small ways and count the changes that quick tests detect: MODULE=train.loop SAMPLE=150
	python tests/mutation.py --module $(call quoted,$(MODULE)) --sample $(call quoted,$(SAMPLE))

bench: setup  ## compare kdnotes with other libraries on this machine, 40 minutes: CONTESTANTS=all|race|quality|inference|scaling|scoring|names ALTERNATIONS=5 STEPS=50
	@mkdir -p $(call quoted,$(RUNS)/bench)
	@papermill nbs/bench.ipynb $(call quoted,$(RUNS)/bench/bench.ipynb) --cwd . --no-progress-bar --log-output -r contestants $(call quoted,$(CONTESTANTS)) \
	    -p alternations $(call quoted,$(ALTERNATIONS)) -p steps $(call quoted,$(STEPS)) \
	    -p smoke $(if $(SHORT),True,False) < /dev/null 2>&1 | $(QUIET) >&2
	@cat $(call quoted,$(RUNS)/bench/table.txt)

scaling: setup  ## measure the cost of synchronising ranks and fit a model of step time, 30 minutes: TURNS=5
	@mkdir -p $(call quoted,$(RUNS)/scaling)
	@papermill nbs/scaling.ipynb $(call quoted,$(RUNS)/scaling/scaling.ipynb) --cwd . --no-progress-bar --log-output \
	    -p turns $(call quoted,$(TURNS)) -p smoke $(if $(SHORT),True,False) < /dev/null 2>&1 | $(QUIET) >&2
	@cat $(call quoted,$(RUNS)/scaling/table.txt)

doctor: setup ## check all modes on this machine in a minute; for your own model: kdnotes doctor -p teacher=<folder> ...
	kdnotes doctor

gpu-check:  ## check a GPU machine in ten minutes: correctness, memory, speed, energy; uses PYTHON without setup; to try it, ARGS='--device cpu --smoke'
	@$(PYTHON) -m bench.gpu_check $(ARGS)

thesis: setup ## build the values, the figures and thesis/thesis.pdf from the committed evidence: offline, in a minute, byte for byte reproducible
	python -m thesis

docs: setup   ## build the docs site in _docs/ from notebooks, modules and evidence: offline, in two minutes
	@python -m docs

lab: setup    ## start JupyterLab
	jupyter lab

lessons: setup  ## execute the lessons in nbs/lessons and store their outputs: ten minutes
	@for lesson in nbs/lessons/*.ipynb; do \
	    echo "$$lesson" && jupyter nbconvert --log-level=ERROR --to notebook --execute --inplace "$$lesson" 2> >($(QUIET) >&2) || \
	    { echo "$$lesson failed at the cell above; mend it, or what it shows, and call make lessons again" >&2; exit 1; }; done
	nbdev_clean --fname nbs/lessons

readme: setup ## generate README.md from nbs/index.ipynb
	jupyter nbconvert --to notebook --execute --inplace nbs/index.ipynb
	nbdev_clean --fname nbs/index.ipynb
	python tools/readme.py

clean:   ## remove .venv and caches; keep runs/
	rm -rf .venv kdnotes.egg-info .pytest_cache _docs _proc mutants
	find kdnotes bench nbs tests tools -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf
