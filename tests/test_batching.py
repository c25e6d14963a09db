"What is random about an epoch's steps, and what kept tokens are named by."

import numpy as np
from test_fuzz import Speller
from kdnotes.core.arms import PROFILES
from kdnotes.distill.models import load_tokenizer
from kdnotes.tasks.batching import encode_pairs, epoch_steps


def test_steps_come_in_random_order_of_length():
    lengths = np.arange(160)
    steps = epoch_steps(lengths, lengths, 8, np.random.default_rng(0))
    longest = [lengths[step].max() for step in steps]
    assert sorted(np.concatenate(steps)) == list(range(160))
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)
    rises = np.mean(np.diff(longest) > 0)
    assert 0.2 < rises < 0.8, 'neither mostly rising nor mostly falling'


class Cutting(Speller):
    "A tokenizer that cuts its texts."

    def __call__(self, first, second, max_length, **more):
        encoded = super().__call__(first, second, **more)
        return {name: [row[:max_length] for row in rows] for name, rows in encoded.items()}


def test_kept_tokens_of_another_length_are_not_taken(tmp_path):
    for length in (6, 4, 6):
        ids, _ = encode_pairs(Cutting(), ['what is it'], ['that'], length, tmp_path)
        assert ids.lengths.tolist() == [length]


def test_what_looks_like_a_special_token_in_a_text_is_letters():
    tokenizer = load_tokenizer(PROFILES['laptop'].teacher)
    ids, second = encode_pairs(tokenizer, ['a [SEP] b [MASK]'], ['[CLS] [PAD]'], 64)
    special = [i for i in ids[0] if i in tokenizer.all_special_ids]
    assert special == [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id]
    assert ids[0][second[0] - 1] == tokenizer.sep_token_id
    assert tokenizer.decode(ids[0]).count('[ sep ]') == 1
