"""Finished runs of every task, of a random network of 32 numbers a token that reads words as MiniLM does:
made once for all tests that use a model after its training.
"""

import contextlib
import warnings
import pytest
import torch
from pathlib import Path
from transformers import BertModel
from architectures import small_bert
from kdnotes.core.given import make_config
from kdnotes.core.resolve import Machine
from kdnotes.distill.models import save_model
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM
from kdnotes.experiment import launch, worker
from kdnotes.experiment.plan import Plan, plan

ON = Machine('cpu', 2)
LENGTHS = dict(answer_selection=64, text_classification=32, masked_lm=32, extractive_qa=96, sentence_pairs=64)


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


def planned(task: str, mode: str, teacher: Path) -> Plan:
    "A smoke run on the task's embedded corpus."
    more = dict(stride=32) if task == 'extractive_qa' else {}
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
