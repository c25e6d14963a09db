"The page about other libraries: what each is for, how its numbers and kdnotes' agree, how fast both are."

import json
from pathlib import Path
from docs.markdown import comment, table

TITLE = """# Beside other libraries

Each of these does something that kdnotes does not. Take the one whose first column is your question."""

COLUMNS = ('your question', 'take', 'what kdnotes does of it')
# what their documentation said in November 2026
ROWS = (
    (
        'I have a training script of my own and want to add a distillation loss',
        '[torchdistill](https://github.com/yoshitomo-matsubara/torchdistill) (YAML, hooks on any module, '
        'vision too), [TextBrewer](https://github.com/airaria/TextBrewer) (many intermediate losses, '
        'several teachers; last release in 2020), '
        '[ModelOpt](https://github.com/NVIDIA/Model-Optimizer) (large models on NVIDIA GPUs)',
        'Trains itself, on five tasks. Its losses are importable functions; the dialects of these libraries '
        'are there by name.',
    ),
    (
        'I want the best embedding or reranking model',
        '[sentence-transformers](https://sbert.net): losses, datasets, evaluators, a hub of models',
        'A cross-encoder for ranking, and pairs of sentences; reads the scores of any model as a teacher.',
    ),
    (
        'I distil a generative model',
        '[TRL](https://huggingface.co/docs/trl), NeMo with ModelOpt',
        'Nothing: encoders only.',
    ),
    (
        'I train on many GPUs with a model that fits on none of them',
        'DeepSpeed, FSDP, Megatron',
        'Data parallelism alone: each rank holds the whole model.',
    ),
    (
        'Is what I gained more than chance, and what did it cost in time, memory and energy?',
        'kdnotes',
        'Arms that differ in one factor, seeds, paired tests with correction, telemetry, a report. '
        'The others leave this to you.',
    ),
)
AGREEMENT = """## Do the numbers agree?

Checked outside of the project, at commit 53dccf6: all scores and thresholds of the official SQuAD
2.0 script on five sets of predictions for 11,873 questions (equal to 2e-12), trec_eval on nine
kinds of ties (equal), pseudo-log-likelihoods of minicons (equal to 7e-6, in a twentieth of its
processor time), and losses and gradients of TextBrewer, torchdistill and ModelOpt (equal to 3e-7).

Tests of the project hold the same on smaller inputs: trec_eval and a plain version of the SQuAD
script each time, TextBrewer, torchdistill and minicons in `make test-all`, where their packages are
installed. ModelOpt is held to values worked out by hand."""
SPEED = """## How fast are they?

The same student and teacher, the same pairs, side by side in one run of `make bench`. `hf_*` is the
Trainer of transformers with a loss of our own; `kdnotes` reads the teacher's outputs from its
cache, whose making is the row `teacher`. In brackets are the slowest and the fastest round."""


def raced(root: Path) -> str:
    "The race on a CPU, with where and when it was run."
    race = json.loads((root / 'thesis' / 'data' / 'bench.json').read_text(encoding='utf-8'))['race']
    rows = [tuple(map(comment, row)) for row in race['table']['rows']]
    said = (
        f'{race["device"]}, {race["dtype"]}, torch {race["torch"]}, {race["steps"]} steps, '
        f'{race["rounds"]} rounds; {race["source"]}.'
    )
    missed = [name for name, value in race['ratios'].items() if name.endswith('.reached') and not value]
    aims = f'Of the aims that were set before, {len(missed)} were missed; the log says which.'
    head = tuple(map(comment, race['table']['head']))
    return f'{table(head, rows, "figures race")}\n\n{comment(f"{said} {aims}")}'


def peers_page(root: Path) -> str:  # the checkout
    "The page."
    return '\n\n'.join([TITLE, table(COLUMNS, ROWS, 'parameters'), AGREEMENT, SPEED, raced(root)]) + '\n'
