"""What is random about an epoch's steps, how ranks share a step, how texts become tokens,
and what kept tokens are named by.
"""

import shutil
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from faults import files_no_larger_than
from ranks import context
from letters import CHUNK, MANY, Counted, make_tokens, of_letters
from test_fuzz import Speller
from kdnotes.core import files
from kdnotes.core.arms import PROFILES
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.tasks import batching
from kdnotes.tasks.base import TaskView
from kdnotes.tasks.batching import (
    Batch,
    EncodedPairs,
    Ragged,
    encode_pairs,
    epoch_steps,
    micro_batches,
    pad_pairs,
    to_device,
)


def test_steps_come_in_random_order_of_length():
    lengths = np.arange(160)
    steps = epoch_steps(lengths, lengths, 8, np.random.default_rng(0))
    longest = [lengths[step].max() for step in steps]
    assert sorted(np.concatenate(steps)) == list(range(160))
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)
    rises = np.mean(np.diff(longest) > 0)
    assert 0.2 < rises < 0.8, 'neither mostly rising nor mostly falling'


def test_pools_hold_whole_steps():
    steps = epoch_steps(np.arange(16), np.arange(16), 4, np.random.default_rng(0), pool=2)
    assert [len(step) for step in steps] == [4] * 4
    assert sorted(np.concatenate(steps)) == list(range(16))
    # neighbours in length among the eight of their pool, and not among all
    assert any(np.ptp(step) > 3 for step in steps)


def test_fifty_steps_share_a_sort_where_nothing_else_is_said():
    lengths = np.random.default_rng(1).integers(1, 99, 240)

    def steps(**more):
        found = epoch_steps(lengths, np.arange(240), 2, np.random.default_rng(0), **more)
        return [step.tolist() for step in found]

    assert steps() == steps(pool=50)


def steps_one_by_one(lengths, groups, batch_size, rng, pool=50):
    "What `epoch_steps` does, group by group, as it was first written: the reference."
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(group, kind='stable'), np.cumsum(sizes)[:-1])
    longest = np.zeros(len(sizes), dtype=np.int64)
    np.maximum.at(longest, group, lengths)
    order = rng.permutation(len(sizes))
    pools = (np.cumsum(sizes[order]) - sizes[order]) // (pool * batch_size)
    steps = []
    for p in np.unique(pools):
        mine = order[pools == p]
        mine = mine[np.argsort(longest[mine], kind='stable')]
        step = (np.cumsum(sizes[mine]) - sizes[mine]) // batch_size
        steps += [np.concatenate([members[g] for g in mine[step == s]]) for s in np.unique(step)]
    return [steps[i] for i in rng.permutation(len(steps))]


@pytest.mark.parametrize('kind', ('alone', 'neighbours', 'scattered', 'larger than a step'))
def test_steps_are_those_of_the_loop_over_groups(kind):
    rng = np.random.default_rng(5)
    for n in (0, 1, 2, 31, 32, 33, 700, 1601):
        lengths = rng.integers(1, 12, n)
        groups = dict(
            alone=np.arange(n),
            neighbours=np.arange(n) // 7,
            scattered=rng.permutation(n) // 5 * 3 - 40,
        ).get(kind, np.arange(n) // 50)
        for batch_size, pool in ((1, 50), (8, 3), (32, 50), (32, 1)):
            rngs = [np.random.default_rng([n, batch_size]) for _ in range(2)]
            found = epoch_steps(lengths, groups, batch_size, rngs[0], pool)
            right = steps_one_by_one(lengths, groups, batch_size, rngs[1], pool)
            assert [step.tolist() for step in found] == [step.tolist() for step in right]
            assert rngs[0].random() == rngs[1].random(), 'the generator has drawn as much'


def test_steps_are_views_of_one_array():
    steps = epoch_steps(np.ones(999, dtype=int), np.arange(999) // 3, 8, np.random.default_rng(0))
    assert len({id(step.base) for step in steps}) == 1 and steps[0].base is not None


def test_equal_lengths_are_ordered_the_same_on_every_machine():
    "A sort that is not stable leaves the order of ties to the machine's own sort."
    equal = np.ones(200, dtype=np.int64)
    [step] = epoch_steps(equal, equal, 200, np.random.default_rng(0))
    assert step.tolist() == list(range(200))
    [part] = micro_batches(np.arange(200), equal, 200)
    assert part.tolist() == list(range(200))[::-1]
    steps = epoch_steps(equal, np.arange(200), 200, np.random.default_rng(0))
    assert steps[0].tolist() == np.random.default_rng(0).permutation(200).tolist()


def test_micro_batches_by_hand():
    def parts(lengths, tokens, *rank):
        return [
            part.tolist() for part in micro_batches(np.arange(len(lengths)), np.array(lengths), tokens, *rank)
        ]

    assert parts([10, 12], 5) == [[1], [0]], 'one that is too long is alone'
    assert parts([1, 1, 1, 1], 4) == [[3, 2, 1, 0]] and parts([0, 0], 2) == [[1, 0]]
    assert parts([5, 4, 3], 8) == [[0], [1, 2]]
    assert parts([5, 4, 3], 8, 1, 2) == [[1]]


def shares(
    sizes: list[int],  # examples of each group
    lengths: list[int],  # tokens of each group's examples
    tokens: int,
    ranks: int = 1,
) -> list[list[list[int]]]:  # of each rank, of each of its micro-batches: the groups in it
    "How ranks share a step of groups."
    groups = np.repeat(np.arange(len(sizes)), sizes)
    index = np.arange(len(groups))
    parts = [micro_batches(index, np.array(lengths)[groups], tokens, r, ranks, groups) for r in range(ranks)]
    return [[list(dict.fromkeys(groups[part].tolist())) for part in of_a_rank] for of_a_rank in parts]


def test_whole_groups_are_shared_evenly():
    assert shares([1, 1, 2], [10] * 3, 1000, 2) == [[[2]], [[0, 1]]]
    assert shares([3, 3, 2, 2, 2], [10] * 5, 1000, 2) == [[[0, 2, 4]], [[1, 3]]]
    # 4 * 5, 10 * 1, 10 * 1 and 5 * 1 tokens
    assert shares([5, 1, 1, 1], [4, 10, 10, 5], 1000, 2) == [[[3, 0]], [[1, 2]]]


def test_micro_batches_of_whole_groups_fit_the_budget():
    # as wide as its longest row: 10 * (1 + 4) are too many
    assert shares([4, 1], [4, 10], 30) == [[[1], [0]]]
    assert shares([2, 2], [5, 5], 20) == [[[0, 1]]]
    assert shares([2, 2], [5, 5], 19) == [[[0], [1]]]


def test_rows_are_padded_to_the_longest():
    for rows, width in (([[7], [8]], 1), ([[]], 1), ([[7], [8, 9, 10]], 3)):
        inputs, tokens = pad_pairs(Ragged.from_rows(rows), np.array([1] * len(rows)), np.arange(len(rows)))
        assert {name: tuple(t.shape) for name, t in inputs.items()} == dict.fromkeys(
            inputs, (len(rows), width)
        )
        assert {t.dtype for t in inputs.values()} == {torch.int64}
        assert inputs['attention_mask'].sum() == tokens == sum(map(len, rows))


def test_a_batch_moves_as_a_whole():
    "Without a GPU, to the device that holds no numbers."
    three = torch.arange(3)
    batch = Batch(np.arange(3), dict(input_ids=three[:, None]), three, 3, three)
    moved = batch.to('meta')
    assert {t.device.type for t in (moved.inputs['input_ids'], moved.labels, moved.groups)} == {'meta'}
    assert batch.labels.device.type == 'cpu' and moved.index is batch.index and moved.tokens == 3
    assert Batch(np.arange(3), {}, three, 3).to('meta').groups is None
    assert to_device(three, 'cpu').tolist() == [0, 1, 2]


class Cutting(Speller):
    "A tokenizer that cuts its texts."

    def __call__(self, first, second, max_length, **more):
        encoded = super().__call__(first, second, **more)
        return {name: [row[:max_length] for row in rows] for name, rows in encoded.items()}


class Untyped(Speller):
    "A tokenizer that knows no segments."

    def __repr__(self):
        return 'Untyped()'

    def __call__(self, first, second, **more):
        return dict(input_ids=super().__call__(first, second, **more)['input_ids'])


class Once(Speller):
    "A tokenizer that may be called once."

    def __init__(self):
        self.called = False

    def __call__(self, first, second, **more):
        assert not self.called, 'the tokens were kept'
        self.called = True
        return super().__call__(first, second, **more)


def test_tokens_of_pairs_and_where_the_second_text_begins():
    ids, second = encode_pairs(of_letters(), ['a b c', 'a'], ['d', 'e f'], 16)
    assert [row.tolist() for row in ids] == [[1, 4, 5, 6, 2, 7, 2], [1, 4, 2, 8, 9, 2]]
    assert second.tolist() == [5, 3] and second.dtype == ids.values.dtype == np.int32
    # the longer text is cut
    ids, second = encode_pairs(of_letters(), ['a b c d', 'f'], ['f', 'a b c d'], 6)
    assert [row.tolist() for row in ids] == [[1, 4, 5, 2, 9, 2], [1, 9, 2, 4, 5, 2]]
    assert second.tolist() == [4, 3]


class Flat:
    "As much of a task as the search for rows in use sees; its ids are known, or only its batches."

    def __init__(self, rows, known, pad_id=0):
        ids = Ragged.from_rows(rows)
        self.pairs = EncodedPairs(dict(train=(ids, np.ones(len(rows), dtype=np.int32))), pad_id)
        if known:
            self.token_ids = self.pairs.token_ids
            self.batch = None

    def lengths(self, split):
        return self.pairs.lengths(split)

    def batch(self, split, index):
        inputs, tokens = self.pairs.inputs(split, index)
        return Batch(index, inputs, torch.zeros(len(index)), tokens)


@pytest.mark.parametrize('pad_id', (0, 3, 90))
@pytest.mark.parametrize('case', ('uneven', 'even', 'empty', 'one row'))
def test_rows_in_use_are_those_of_the_batches(case, pad_id, monkeypatch):
    from kdnotes.train.cpu_fast_path import rows_in_use

    monkeypatch.setattr(batching, '_AT_ONCE', 7)  # ids are read in pieces
    rng = np.random.default_rng(1)
    sizes = dict(uneven=rng.integers(1, 9, 60), even=[4] * 60, empty=[0] * 3).get(case, [5])
    rows = [rng.integers(1, 60, n).tolist() for n in sizes]
    found, right = (rows_in_use(Flat(rows, known, pad_id), 100) for known in (True, False))
    assert found.tolist() == right.tolist() and found.dtype == torch.int64
    assert (pad_id in found) == (case in ('uneven', 'empty') or any(pad_id in row for row in rows))


def test_a_large_share_keeps_the_whole_table():
    from kdnotes.train.cpu_fast_path import rows_in_use

    task = Flat([[1, 2, 3], [4, 5, 6]], known=True)
    assert rows_in_use(task, 8).tolist() == [1, 2, 3, 4, 5, 6] and rows_in_use(task, 7) is None


def test_ids_of_another_batch_are_looked_for_in_it():
    view = TaskView(Flat([[1, 2], [3, 4]], known=False), batch=None)
    assert view.token_ids('train') is None
    named = TaskView(Flat([[1, 2], [3, 4]], known=True), lengths=None)
    assert [ids.tolist() for ids in named.token_ids('train')] == [[1, 2, 3, 4]]


def test_a_single_text_has_no_second_segment():
    ids, second = encode_pairs(of_letters(), ['a b c', 'a'], None, 16)
    assert ids.lengths.tolist() == second.tolist() == [5, 3]
    ids, second = encode_pairs(Untyped(), ['ab', 'c'], ['de', 'f'], 16)
    assert ids.lengths.tolist() == second.tolist() == [4, 2] and second.dtype == np.int32


def test_kept_tokens_are_read_and_not_made_again(tmp_path):
    tokenizer = Once()
    texts = ['ab', 'c'], ['d', 'efg']
    fresh, second = encode_pairs(tokenizer, *texts, 16, tmp_path)
    kept, kept_second = encode_pairs(tokenizer, *texts, 16, tmp_path)
    assert kept.values.tolist() == fresh.values.tolist() and kept.offsets.tolist() == fresh.offsets.tolist()
    assert kept_second.tolist() == second.tolist()


def test_kept_tokens_of_another_length_are_not_taken(tmp_path):
    for length in (6, 4, 6):
        ids, _ = encode_pairs(Cutting(), ['what is it'], ['that'], length, tmp_path)
        assert ids.lengths.tolist() == [length]


def test_kept_tokens_are_of_these_texts_and_this_tokenizer(tmp_path):
    letters = of_letters()
    cases = (
        (letters, ['a', 'b'], None),
        (letters, ['a'], ['b']),
        (letters, ['a'], ['c']),
        (letters, ['c'], ['c']),
        (of_letters('hgfedcba'), ['c'], ['c']),
        (Speller(), ['c'], ['c']),
        (Untyped(), ['c'], ['c']),
    )
    for n, case in enumerate(cases, 1):
        encode_pairs(*case, 16, tmp_path)
        assert len(list(tmp_path.glob('*.tokens'))) == n
    letters(['a b c'], padding='max_length', truncation=True, max_length=4)  # it remembers both settings
    encode_pairs(*cases[0], 16, tmp_path)
    assert len(list(tmp_path.glob('*.tokens'))) == len(cases)


@pytest.fixture
def chunks(monkeypatch):
    monkeypatch.setattr(batching, 'ROWS_AT_ONCE', CHUNK)


def same_pairs(one, other):
    return all(
        np.array_equal(a, b)
        for a, b in zip(
            (one[0].values, one[0].offsets, one[1]), (other[0].values, other[0].offsets, other[1])
        )
    )


@pytest.mark.parametrize('second', (None, MANY[::-1]))
@pytest.mark.parametrize('n', (1, CHUNK, CHUNK + 1, 19))
def test_chunks_are_what_is_tokenised_at_once(tmp_path, chunks, n, second):
    tokenizer = Counted()
    first = MANY[:n]
    second = second and second[:n]
    at_once = encode_pairs(of_letters(), first, second, 9)
    kept = encode_pairs(tokenizer, first, second, 9, tmp_path)
    assert same_pairs(kept, at_once) and max(tokenizer.rows) <= CHUNK
    assert kept[0].values.dtype == np.uint16 and kept[1].dtype == np.int16
    assert not kept[0].values.flags.writeable and not isinstance(kept[0].values, np.memmap)
    assert same_pairs(encode_pairs(Counted(stop_at=0), first, second, 9, tmp_path), at_once), 'read'
    rows = np.arange(n)[::-1]
    for name, value in pad_pairs(*kept, rows)[0].items():
        assert torch.equal(value, pad_pairs(*at_once, rows)[0][name])


def test_a_large_vocabulary_and_long_texts_take_wider_numbers(tmp_path):
    large = of_letters([str(i) for i in range(2**16)])
    ids, second = encode_pairs(large, [str(2**16 - 1)], None, 2**15, tmp_path)
    assert ids.values.dtype == second.dtype == np.int32
    assert ids.values.tolist() == [1, 2**16 + 3, 2]


def test_tokens_go_on_where_they_were_interrupted(tmp_path, chunks):
    with pytest.raises(KeyboardInterrupt):
        encode_pairs(Counted(stop_at=2), MANY, MANY, 9, tmp_path)  # two chunks
    tokenizer = Counted()
    kept = encode_pairs(tokenizer, MANY, MANY, 9, tmp_path)
    assert same_pairs(kept, encode_pairs(of_letters(), MANY, MANY, 9))
    assert tokenizer.rows == [4, 4, 3], 'what was missing'


@pytest.mark.parametrize('finished', (True, False))
def test_kept_tokens_of_other_texts_are_not_taken(tmp_path, chunks, finished):
    "Whole as they are, or begun: somebody put them there."
    others = [text[::-1] + 'z' for text in MANY]
    right = encode_pairs(of_letters(), MANY, None, 9, tmp_path)[0].values.tolist()
    [mine] = tmp_path.glob('*.tokens')
    if finished:
        encode_pairs(of_letters(), others, None, 9, tmp_path)
    else:
        with pytest.raises(KeyboardInterrupt):
            encode_pairs(Counted(stop_at=2), others, None, 9, tmp_path)
    [other] = [path for path in tmp_path.glob('*.tokens') if path != mine]
    shutil.rmtree(mine)
    shutil.copytree(other, mine)
    assert encode_pairs(of_letters(), MANY, None, 9, tmp_path)[0].values.tolist() == right


def test_a_disk_that_is_too_small_is_told_of_before(tmp_path, chunks, monkeypatch):
    tokenizer = Counted()
    monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: SimpleNamespace(free=100))
    with pytest.raises(files.FileError) as refusal:
        encode_pairs(tokenizer, MANY, MANY, 9, tmp_path / 'tokens')
    sentence = str(refusal.value)
    assert 'the tokens of 19 texts take about 0.0 MB in ' in sentence and str(tmp_path / 'tokens') in sentence
    assert 'its disk has 0.0 MB free; free some room, or set KDNOTES_HOME' in sentence
    assert tokenizer.rows == [CHUNK], 'nothing but the first chunk was tokenised'
    assert not [path for path in tmp_path.rglob('*') if path.is_file() and path.stat().st_size]
    monkeypatch.undo()
    encode_pairs(tokenizer, MANY, MANY, 9, tmp_path / 'tokens')


def test_the_size_that_is_foreseen_is_that_of_the_map(tmp_path, chunks, monkeypatch):
    texts = ['a b c'] * 400
    foreseen = []
    monkeypatch.setattr(batching, 'check_room', lambda folder, needed, what: foreseen.append(needed))
    encode_pairs(of_letters(), texts, texts, 99, tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.glob('*.tokens/[!m]*'))
    assert [1.0 <= needed / size <= 1.3 for needed in foreseen] == [True]


@pytest.mark.parametrize('size', (0, 30, 60, 200))
def test_tokens_that_cannot_be_written_leave_nothing_half_used(tmp_path, chunks, size):
    "The system refuses more bytes, whichever file and write they are of."
    with (
        files_no_larger_than(size),
        pytest.raises(files.FileError, match='File too large'),
    ):
        encode_pairs(of_letters(), MANY, MANY, 9, tmp_path)
    assert not list(tmp_path.glob('*.tokens/manifest.json'))
    kept = encode_pairs(of_letters(), MANY, MANY, 9, tmp_path)
    assert same_pairs(kept, encode_pairs(of_letters(), MANY, MANY, 9))


@pytest.mark.exhaustive
def test_processes_that_make_the_same_tokens_do_not_harm_each_other(tmp_path):
    with ProcessPoolExecutor(2, context) as pool:
        found = list(pool.map(make_tokens, [tmp_path] * 2))
    assert len({of[:3] for of in found}) == 1
    assert sum(made for *_, made in found) == 1, 'one made them, the other waited'


def test_splits_are_encoded_and_padded_with_the_tokenizers_own_token(tmp_path):
    texts = dict(train=(['a b c', 'a'], ['d', 'e']), dev=(['a', 'b c'], None))
    pairs = EncodedPairs.from_texts(of_letters(), texts, 6, tmp_path)
    assert len(list(tmp_path.glob('*.tokens'))) == 2
    assert pairs.lengths('train').tolist() == [6, 5] and pairs.lengths('dev').tolist() == [3, 4]
    inputs, tokens = pairs.inputs('dev', np.array([0, 1]))
    assert inputs['input_ids'].tolist() == [[1, 4, 2, 3], [1, 5, 6, 2]] and tokens == 7
    assert not inputs['token_type_ids'].any()
    unpadded = of_letters()
    unpadded.pad_token = None
    assert EncodedPairs.from_texts(unpadded, texts, 6).pad_id == 0


def test_what_looks_like_a_special_token_in_a_text_is_letters():
    tokenizer = load_tokenizer(PROFILES['laptop'].teacher)
    ids, second = encode_pairs(tokenizer, ['a [SEP] b [MASK]'], ['[CLS] [PAD]'], 64)
    special = [i for i in ids[0] if i in tokenizer.all_special_ids]
    assert special == [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.sep_token_id]
    assert ids[0][second[0] - 1] == tokenizer.sep_token_id
    assert tokenizer.decode(ids[0]).count('[ sep ]') == 1


def test_a_step_of_a_large_corpus_takes_no_difference_over_all_of_it():
    "The offsets are read once, whatever the number of steps; rows are found by them alone."

    class Counted(np.ndarray):
        "Offsets that count how often all of them are read at once."

        reads = 0

        def __getitem__(self, key):
            if len(self) == 1001 and isinstance(key, (slice, tuple)):
                Counted.reads += 1
            return super().__getitem__(key)

    offsets = (np.arange(1001, dtype=np.int64) * 3).view(Counted)
    rows = Ragged(np.arange(3000, dtype=np.int32), offsets)
    second = np.ones(1000, dtype=np.int32)
    for step in range(5):
        index = np.arange(step, 1000, 250)
        assert micro_batches(index, rows.lengths, 8192)[0].size == 4
        inputs, tokens = pad_pairs(rows, second, index)
        assert inputs['input_ids'][:, 0].tolist() == (3 * index).tolist() and tokens == 12
    assert Counted.reads == 2, 'of one difference'
