"The page about other libraries: what each is for, how its numbers and kdnotes' agree, how fast both are."

import json
from pathlib import Path
from docs.markdown import comment, table

TITLE = """# Comparison with other libraries

Each of these libraries does something that kdnotes does not. Choose by your question."""

COLUMNS = ('your question', 'use', 'what kdnotes offers')
# what their documentation said in November 2026
ROWS = (
    (
        'I have my own training script and want to add a distillation loss',
        '[torchdistill](https://github.com/yoshitomo-matsubara/torchdistill) (YAML, hooks on any module, '
        'vision too), [TextBrewer](https://github.com/airaria/TextBrewer) (many intermediate losses, '
        'several teachers; last release in 2020), '
        '[ModelOpt](https://github.com/NVIDIA/Model-Optimizer) (large models on NVIDIA GPUs)',
        'Has its own training loop, for five tasks. Its losses are functions that you can import; the loss '
        'conventions of these libraries are available by name.',
    ),
    (
        'I want the best embedding or reranking model',
        '[sentence-transformers](https://sbert.net): losses, datasets, evaluators, a hub of models',
        'A cross-encoder for ranking, and sentence pairs; the scores of any model can be the teacher.',
    ),
    (
        'I distil a generative model',
        '[TRL](https://huggingface.co/docs/trl), NeMo with ModelOpt',
        'Not supported: encoders only.',
    ),
    (
        'I train a model that is too large for one GPU',
        'DeepSpeed, FSDP, Megatron',
        'Only data parallelism: each rank holds the whole model.',
    ),
    (
        'Is my gain statistically significant, and what did it cost in time, memory and energy?',
        'kdnotes',
        'Arms that differ in one factor, several seeds, corrected paired tests, telemetry and reports. '
        'The other libraries leave this to you.',
    ),
)
AGREEMENT = """## Do the numbers agree?

Checked independently of the project, at commit 53dccf6: all scores and thresholds of the official SQuAD
2.0 script on five sets of predictions for 11,873 questions (equal to 2e-12), trec_eval on nine
kinds of ties (equal), pseudo-log-likelihoods of minicons (equal to 7e-6, with a twentieth of its
processor time), and losses and gradients of TextBrewer, torchdistill and ModelOpt (equal to 3e-7).

The tests of the project check the same on smaller inputs: trec_eval and a plain version of the SQuAD
script in every run, TextBrewer, torchdistill and minicons in `make test-all` if their packages are
installed. ModelOpt is compared with values calculated by hand."""
SPEED = """## How fast are they?

All libraries use the same student, teacher and pairs in one run of `make bench`. `hf_*` is the
Trainer of transformers with a custom loss. `kdnotes` reads the teacher's outputs from its cache; the
row `teacher` is the time to fill it. The slowest and the fastest round are in brackets."""


def raced(root: Path) -> str:
    "The race on a CPU, with where and when it was run."
    race = json.loads((root / 'thesis' / 'data' / 'bench.json').read_text(encoding='utf-8'))['race']
    rows = [tuple(map(comment, row)) for row in race['table']['rows']]
    said = (
        f'{race["device"]}, {race["dtype"]}, torch {race["torch"]}, {race["steps"]} steps, '
        f'{race["rounds"]} rounds; {race["source"]}.'
    )
    missed = [name for name, value in race['ratios'].items() if name.endswith('.reached') and not value]
    aims = f'{len(missed)} of the targets set in advance were missed; the log lists them.'
    head = tuple(map(comment, race['table']['head']))
    return f'{table(head, rows, "figures race")}\n\n{comment(f"{said} {aims}")}'


def peers_page(root: Path) -> str:  # the checkout
    "The page."
    return '\n\n'.join([TITLE, table(COLUMNS, ROWS, 'parameters'), AGREEMENT, SPEED, raced(root)]) + '\n'
