"""Corpora and models small enough to train in a blink; and a finished run of each task, of a random network
that reads words as MiniLM does: made once for all tests that use a model after its training.
"""

import contextlib
import string
import warnings
from pathlib import Path
import numpy as np
import pytest
import torch
import transformers
from transformers import BertModel
from architectures import small_bert
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.distill.models import save_model
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM
from kdnotes.experiment import launch, worker
from kdnotes.experiment.plan import Plan, plan
from kdnotes.tasks.candidates import SCHEMA

ON = Machine('cpu', 2)
LENGTHS = dict(answer_selection=64, text_classification=32, masked_lm=32, extractive_qa=96, sentence_pairs=64)
LENGTHS |= dict(token_classification=48, embeddings=64)


def small_model(folder: Path, seed: int = 0) -> Path:
    "Two layers, and the words of MiniLM."
    tokenizer = load_tokenizer(MINILM)
    torch.manual_seed(seed)
    model = BertModel(
        small_bert(
            len(tokenizer), max_position_embeddings=128, initializer_range=0.2, hidden_dropout_prob=0.1
        )
    )
    return save_model(model, folder, tokenizer)


def write_corpus(folder: Path) -> Path:
    "Questions of made-up words; candidates from 2 to 30 words long."
    rng = np.random.default_rng(0)

    def text(n):
        return ' '.join(''.join(rng.choice(list('abcdefgh'), rng.integers(1, 4))) for _ in range(n))

    folder.mkdir(parents=True)
    for split, questions in dict(train=16, dev=2, test=2).items():
        rows = ['\t'.join(SCHEMA.names.values())]
        for q in range(questions):
            question = text(rng.integers(3, 8))
            rows += [
                '\t'.join(
                    [
                        f'{split}{q}',
                        question,
                        f'D{q}',
                        f'title {q}',
                        f'D{q}-{i}',
                        text(rng.integers(2, 30)),
                        str(int(i == 0)),
                    ]
                )
                for i in range(5)
            ]
        (folder / f'WikiQA-{split}.tsv').write_text('\n'.join(rows) + '\n')
    return folder


def write_model(folder: Path, kind: str = 'bert') -> Path:
    "A random model of two layers with a tokenizer that spells; the two segments matter to it."
    folder.mkdir(parents=True)
    (folder / 'vocab.txt').write_text(
        '\n'.join(
            [
                '[PAD]',
                '[UNK]',
                '[CLS]',
                '[SEP]',
                '[MASK]',
                *(mark + c for mark in ('', '##') for c in string.ascii_lowercase),
            ]
        )
    )
    tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)
    torch.manual_seed(len(kind))
    if kind == 'bert':
        model = transformers.BertForSequenceClassification(
            small_bert(
                len(tokenizer), max_position_embeddings=96, initializer_range=0.2, hidden_dropout_prob=0.3
            )
        )
    else:
        model = transformers.DistilBertForSequenceClassification(
            transformers.DistilBertConfig(
                vocab_size=len(tokenizer),
                dim=32,
                n_layers=1,
                n_heads=2,
                hidden_dim=64,
                max_position_embeddings=96,
            )
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_encoder(folder: Path) -> Path:
    "A random model without a head, as pretrained ones are: its task gives it one."
    write_model(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    model.base_model.save_pretrained(folder)
    return folder


def planned(task: str, mode: str, teacher: Path) -> Plan:
    "A smoke run on the task's embedded corpus."
    more = dict(stride=32) if task == 'extractive_qa' else {}
    more |= dict(head_bias='zero') if task == 'token_classification' else {}  # else all words are O
    student = dict(student_layers=(1,)) if 'student' in mode or 'kd' in mode else {}
    config = make_config(
        task=task,
        mode=mode,
        corpus='embedded',
        teacher=str(teacher),
        max_length=LENGTHS[task],
        threads_per_rank=1,
        ranks=1,
        smoke=True,
        study='small',
        **more,
        **student,
    )
    return plan(config, ON)


class RankHere:
    "The one rank of a run in this process, where all that a rank imports is there already."

    def __init__(self, module: str, config_file: Path, *, ranks: int, log: Path, **of_processes):
        assert ranks == 1, 'several ranks are processes'
        self.config_file = config_file
        self.log = log

    def start(self) -> None:
        with self.log.open('w') as out, contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter('ignore')  # a rank's are no errors, they go to its log
            worker.worker(self.config_file)
        torch.set_flush_denormal(False)

    def poll(self) -> int:
        return 0

    def stop(self) -> None:
        pass

    def wait(self) -> None:
        pass


def train_here(patched: pytest.MonkeyPatch) -> None:
    "Runs of one rank are trained by this process: for tests of what a run leaves, not of how it is started."
    patched.setattr(launch, 'Ranks', RankHere)
    patched.setattr(worker, 'die_with_parent', lambda: None)


def make_small_run(task: str, mode: str, teacher: Path) -> str:
    "The run_id of a run that is made where there is none."
    its_plan = planned(task, mode, teacher)
    with pytest.MonkeyPatch.context() as patched:
        train_here(patched)
        launch.execute(its_plan)
    return its_plan.run_id
