"""Finished runs of every task, of a random network of 32 numbers a token that reads words as MiniLM does:
made once for all tests that use a model after its training.
"""

import torch
from pathlib import Path
from transformers import BertModel
from architectures import small_bert
from kdnotes.core.config import make_config
from kdnotes.core.resolve import Machine
from kdnotes.distill.models import MINILM, load_tokenizer, save_model
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import Plan, plan

ON = Machine('cpu', 2)
LENGTHS = dict(answer_selection=64, text_classification=32, masked_lm=32, extractive_qa=96)


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


def make_small_run(task: str, mode: str, teacher: Path) -> str:
    "The run_id of a run that is made where there is none."
    its_plan = planned(task, mode, teacher)
    execute(its_plan)
    return its_plan.run_id
