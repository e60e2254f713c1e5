# make quickstart   makes the environment, installs, then prepares, trains, samples and evaluates:
#                   the main job from end to end, on a CPU: text from an embedding, an embedding
#                   from text, gaps filled, both from noise, and each with its controls
# make test         makes the environment, installs, runs all tests, on the CPU: they see no card
# make gpu          makes the environment, installs, runs the tests of a card, times our configs on
#                   it, compares its losses with a CPU's; without a card it fails
# make clean        removes the environment, and the data and the run of the quickstart
#
# With another interpreter, or in another place: make test PYTHON=python3.12 VENV=/some/where

PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python

quickstart: $(VENV)/installed
	@printf '\n1 of 7, 1 to 2 minutes: the documentation of Python becomes tokens and embeddings\n'
	$(PY) prepare.py config/quickstart.py
	@printf '\n2 of 7, 1 to 6 minutes: one network learns to write in every direction\n'
	$(PY) train.py config/quickstart.py
	@printf '\n3 of 7, seconds: a text from the embedding of a text\n'
	$(PY) sample.py --text="Return the number of items in the list."
	@printf '\n4 of 7, seconds: an embedding from a text\n'
	$(PY) sample.py --mode=t2l --text="Return the number of items in the list."
	@printf '\n5 of 7, seconds: gaps are filled\n'
	$(PY) sample.py --mode=infill --text="Return the [MASK] of items in the [MASK]."
	@printf '\n6 of 7, seconds: texts and their embeddings, both from noise\n'
	$(PY) sample.py --mode=unconditional --num_samples=3
	@printf '\n7 of 7, 1 to 3 minutes: each direction is measured against simple rivals\n'
	$(PY) evaluate.py config/quickstart.py
	@printf '\nWhat next? The nearest of 12 drafts; captions, by larger weights; a page of this run:\n'
	@printf '  $(PY) sample.py --rerank=12 --text="Raise an error if the file does not exist."\n'
	@printf '  $(PY) sample.py --out_dir=weights/captions --latents=weights/captions/ten.npy\n'
	@printf '  $(PY) plot.py --what=report\n'

test: $(VENV)/installed
	$(PY) -m pip install --disable-pip-version-check --quiet -r tests/requirements.txt
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder tests

gpu: $(VENV)/installed
	$(PY) -m pip install --disable-pip-version-check --quiet -r tests/requirements.txt
	NANOLDLM_NEEDS_CUDA=1 $(PY) -m pytest -q tests/test_cuda.py
	$(PY) bench.py --what=gpu --device=cuda

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check --quiet -r requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) out/quickstart data/quickstart

.PHONY: quickstart test gpu clean
