"A masked language model of made-up words, small enough to train in a second."

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast
from kdnotes.core.spec import RunConfig
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.losses.vocabulary import open_decoder
from kdnotes.tasks.masked_lm import MaskedLM
from kdnotes.tasks.sources import Corpus

SPECIAL = ['[PAD]', '[UNK]', '[CLS]', '[SEP]', '[MASK]']
WORDS = 60
LENGTH = 16


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    "One token a word: w0 .. w59."
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *(f'w{i}' for i in range(WORDS))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token='[UNK]'))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ('pad_token', 'unk_token', 'cls_token', 'sep_token', 'mask_token')
    return PreTrainedTokenizerFast(tokenizer_object=backend, **dict(zip(names, SPECIAL)))


def tiny_corpus(blocks: int = 11, seed: int = 0) -> Corpus:
    "Words that follow each other by a rule: after w5 comes w6, now and then something else."
    rng = np.random.default_rng(seed)

    def text(words: int) -> str:
        found = [int(rng.integers(WORDS))]
        while len(found) < words:
            found.append((found[-1] + 1) % WORDS if rng.random() < 0.9 else int(rng.integers(WORDS)))
        return ' '.join(f'w{i}' for i in found)

    def rows(split: str, n: int) -> list[dict]:
        return [dict(id=f'{split}-{i}', text=text(3 * LENGTH), cluster=f'{split}-{i}') for i in range(n)]

    n = -(-blocks * (LENGTH - 2) // (3 * LENGTH + 1))
    splits = dict(train=rows('train', n), dev=rows('dev', 4), test=rows('test', 6))
    return Corpus('tiny', 'folder', 'nowhere', splits, f'{seed:064d}')


def tiny_lm_config(mode: str = 'full_kd', ranks: int = 1, **parameters) -> RunConfig:
    "Resolved, for a CPU."
    defaults = dict(
        threads_per_rank=1,
        epochs=2,
        learning_rate=3e-3,
        batch_size=4,
        max_length=LENGTH,
        pseudo_sample=20,
        student_layers=(0, 1) if mode.startswith(('full_', 'mixed_kd', 'mixed_student')) else None,
    )
    given = make_config(task='masked_lm', mode=mode, ranks=ranks, **defaults | parameters)
    config = resolve(given, Machine('cpu', cores=2), 'embedded', teacher_depth=2)
    return config


def tiny_task(config: RunConfig, corpus: Corpus | None = None, tokenizer=None) -> MaskedLM:
    "The task of a configuration, encoded."
    task = MaskedLM.from_corpus(corpus or tiny_corpus(), config)
    task.encode(tokenizer or tiny_tokenizer())
    return task


def tiny_lm(seed: int = 0, dropout: float = 0.0, closed: bool = False) -> BertForMaskedLM:
    "Two layers of 32; its output layer is open, as in every model that kdnotes loads."
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(SPECIAL) + WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        initializer_range=0.1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    model = BertForMaskedLM(config)
    return model if closed else open_decoder(model)
