"""The teacher in training is the teacher alone; cached is online to the stated precision;
a cache is whole or missing.

On a tiny random BERT.

"""

import copy
import errno
import inspect
import itertools
import json
import multiprocessing
import shutil
import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
)
from kdnotes.distill import teacher_cache as T
from kdnotes.tasks.sources import load_corpus
from kdnotes.experiment.compatibility import make_task
from kdnotes.tasks.answer_selection import AnswerSelection, AnswerSelectionSettings
from kdnotes.core import files
from kdnotes.core.cached import Writer
from kdnotes.core.parse import make_config
from kdnotes.core.files import FileError, read_signed, write_signed
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.tasks.batching import Batch, Ragged, pad_pairs
from kdnotes.tasks.base import SignalSpec
from kdnotes.distill.needed_positions import first_position
from kdnotes.distill.teacher_cache import (
    SignalError,
    Workers,
    key_parts,
    make_signal,
    online_signal,
    open_signal,
    signal_key,
    teacher_signal,
)

KEY = dict(
    weights_sha256='w',
    config_sha256='f',
    corpus_sha256='c',
    tokenizer_sha256='t',
    split='train',
    max_length=24,
    forward_dtype='fp32',
    storage_dtype='fp32',
    subset='all',
)


class Pairs:
    "Random pairs of token sequences of different lengths, with two signals."

    signal_spec = {'logits': SignalSpec((2,)), 'margin': SignalSpec(())}

    def __init__(self, n=41, seed=0):
        rng = np.random.default_rng(seed)
        self.ids = Ragged.from_rows([rng.integers(5, 100, length) for length in rng.integers(4, 24, n)])
        self.second = (self.ids.lengths // 2).astype(np.int32)
        self.all = np.arange(n)

    def lengths(self, split):
        return self.ids.lengths

    def signal(self, outputs, batch):
        return {'logits': outputs.logits, 'margin': outputs.logits[:, 1] - outputs.logits[:, 0]}

    def batch(self, split, index):
        inputs, tokens = pad_pairs(self.ids, self.second, index)
        return Batch(index, inputs, torch.zeros(len(index), dtype=torch.int64), tokens)


def tiny_teacher():
    "BERT of 2 layers, width 32, 100 words; big enough weights that token types and dropout show."
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=100,
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                max_position_embeddings=64,
                initializer_range=0.2,
            )
        )


EXACT = dict(relative=0.0, absolute=1e-5)


def close(a: dict, b: dict, bound=EXACT) -> bool:
    return a.keys() == b.keys() and all(
        bool(((a[k] - b[k]).abs() <= bound['absolute'] + bound['relative'] * b[k].abs()).all()) for k in a
    )


@pytest.fixture
def task():
    return Pairs()


@pytest.fixture
def teacher():
    return tiny_teacher()


@pytest.fixture
def batch(task):
    return task.batch('train', np.array([7, 3, 40, 0, 12, 25]))


@pytest.fixture
def alone(teacher, batch):
    "The teacher's logits by plain transformers: all inputs, eval mode, float32."
    with torch.no_grad():
        return tiny_teacher().eval()(**batch.inputs).logits


# ---- correctness 3: the teacher in the trainer is the teacher alone ----


def test_teacher_in_training_is_the_teacher_alone(task, teacher, batch, alone):
    assert batch.inputs['token_type_ids'].any() and not batch.inputs['attention_mask'].all()
    signal = online_signal(task, teacher.train())  # as a trainer might have left it
    with torch.autocast('cpu', dtype=torch.bfloat16):
        seen = signal(batch)
    assert torch.allclose(seen['logits'], alone, rtol=0, atol=1e-6)
    assert seen['logits'].dtype == torch.float32
    teacher.train()  # and again between two steps
    assert torch.allclose(signal(batch)['logits'], alone, rtol=0, atol=1e-6)


# ---- correctness 4: cached is online ----


@pytest.mark.parametrize('dtype, relative', [('fp32', 0.0), ('fp16', 2**-11), ('bf16', 2**-8)])
def test_cached_is_online_to_the_stated_precision(task, teacher, tmp_path, dtype, relative):
    signal = make_signal(task, teacher, tmp_path, KEY | {'storage_dtype': dtype}, tokens=100)
    bound = signal.meta['precision']
    assert bound == {'relative': relative, 'absolute': 1e-5}
    online = online_signal(task, teacher)
    rng = np.random.default_rng(0)
    for index in (task.all, rng.permutation(task.all), np.array([40, 40, 0]), np.array([5])):
        b = task.batch('train', index)
        assert close(signal(b), online(b), bound)
        assert all(v.dtype == torch.float32 for v in signal(b).values())
    assert signal(task.batch('train', task.all[:3]))['margin'].shape == (3,)


def test_a_teacher_in_bf16_is_itself_in_bf16(task, teacher, batch, alone, tmp_path):
    plain = tiny_teacher().eval()
    with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16), first_position(plain):
        by_hand = plain(**batch.inputs).logits.float()
    online = online_signal(task, teacher, 'bf16')
    seen = online(batch)['logits']
    assert torch.equal(seen, by_hand) and seen.dtype == torch.float32
    assert (seen - alone).abs().max() > 1e-4
    with torch.autocast('cpu', dtype=torch.float16):  # the student's format is not the teacher's
        assert torch.equal(online(batch)['logits'], by_hand)
    signal = make_signal(task, teacher, tmp_path, KEY | {'forward_dtype': 'bf16'}, tokens=100)
    assert signal.meta['precision'] == T.precision('fp32', 'bf16')
    for index in (task.all, np.array([40, 40, 0]), np.array([5])):
        b = task.batch('train', index)
        assert close(signal(b), online(b), signal.meta['precision'])
    assert open_signal(tmp_path, signal_key(**KEY)) is None


def test_the_format_of_a_runs_teacher_reaches_it(task, teacher, batch):
    "Online, with and without intermediate layers."
    from kdnotes.distill.intermediate import online_teacher

    task.loss_terms = task.loss_counts = None  # members that a view replaces
    for more in ({}, dict(hidden_loss='mse', hidden_layers=(1,))):
        said = {}
        for dtype in ('fp32', 'bf16'):
            config = make_config(mode='full_kd', signal='online', forward_dtype=dtype, **more)
            said[dtype] = online_teacher(task, teacher, config)(batch)
        alone = teacher_signal(task, teacher, batch)
        assert torch.allclose(said['fp32']['logits'], alone['logits'], rtol=0, atol=1e-5)
        assert 1e-4 < (said['bf16']['logits'] - alone['logits']).abs().max() < 0.05


# ---- one function names the signal of every user ----

# the corpus and the teacher's own questions by a sha256; the others are applied to stored logits
NOT_INPUTS = {'corpus', 'teacher_questions', 'loss', 'ranking_loss', 'ranking_weight', 'pointwise_weight'}
OTHER = dict(max_length=64, train_questions='answered', smoke=True, document_title=True)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
    from architectures import WORDS

    folder = tmp_path_factory.mktemp('tokenizer')
    (folder / 'vocab.txt').write_text('\n'.join(WORDS))
    return BertTokenizerFast.from_pretrained(folder)


def named(teacher, tokenizer, corpus_sha256='c', **parameters) -> str:
    config = resolve(make_config(mode='full_kd', **parameters), Machine('cpu', 2), 'embedded')
    task = make_task(config, load_corpus('answer_selection', 'embedded'))
    return signal_key(**key_parts(task, config, teacher, tokenizer, corpus_sha256))


def test_what_a_task_reads_is_in_the_key_or_changes_no_input():
    own = set(inspect.signature(AnswerSelection.__init__).parameters) - {'self', 'settings'}
    assert (own | set(AnswerSelectionSettings.model_fields)) - NOT_INPUTS == set(OTHER)


def test_whatever_changes_a_signal_changes_its_key(teacher, tokenizer):
    key = named(teacher, tokenizer)
    others = [named(teacher, tokenizer, **{k: v}) for k, v in OTHER.items()]
    others += [named(teacher, tokenizer, **{f'{name}_dtype': 'bf16'}) for name in ('signal', 'forward')]
    others += [named(teacher, tokenizer, corpus_sha256='d')]
    more = copy.deepcopy(tokenizer)
    more.add_tokens(['zzyzx'])
    others.append(named(teacher, more))
    with torch.no_grad():
        next(teacher.parameters())[0, 0] += 1
    others.append(named(teacher, tokenizer))
    assert len({key, *others}) == 1 + len(others)
    assert named(teacher, tokenizer, temperature=4.0, alpha=0.3, seed=5) == others[-1], (
        'the same teacher says the same'
    )


def test_a_benchmark_names_a_signal_as_a_run_does(teacher, tokenizer):
    from types import SimpleNamespace
    from bench.turns import signal_parts

    config = resolve(
        make_config(mode='full_kd', document_title=True, max_length=64), Machine('cpu', 2), 'embedded'
    )
    task = make_task(config, load_corpus('answer_selection', 'embedded'))
    place = SimpleNamespace(task=task, config=config, tokenizer=tokenizer, corpus=SimpleNamespace(sha256='c'))
    assert signal_key(**signal_parts(place, teacher)) == named(
        teacher, tokenizer, document_title=True, max_length=64
    )


# ---- made once ----


class Counted(torch.nn.Module):
    def __init__(self, inner, fail_after=None):
        super().__init__()
        self.inner = inner
        self.calls = 0
        self.fail_after = fail_after

    def forward(self, input_ids, attention_mask, token_type_ids):
        self.calls += 1
        if self.fail_after is not None and self.calls > self.fail_after:
            raise KeyboardInterrupt
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)


def test_made_once_and_cost_kept(task, teacher, tmp_path):
    counted = Counted(teacher)
    first = make_signal(task, counted, tmp_path, KEY, tokens=64)
    calls = counted.calls
    again = make_signal(task, counted, tmp_path, KEY, tokens=64)
    assert calls > 1 and counted.calls == calls and again.meta == first.meta and again.meta['teacher_s'] > 0
    assert again.meta['key'] == signal_key(**KEY) and again.meta['examples'] == 41
    assert again.meta['key_parts'] == KEY
    make_signal(task, counted, tmp_path, KEY | {'weights_sha256': 'another teacher'}, tokens=64)
    assert counted.calls == 2 * calls


def flip(path):
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def empty(path):
    path.write_bytes(b'')


ONLY = f'shard-0-41-{signal_key(**KEY)[:16]}'


def edit(**more):
    # what is not written there is not believed
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | more))


def sign(**more):
    "As if it had been written like that."

    return lambda path: write_signed(path, read_signed(path) | more)


@pytest.mark.parametrize(
    'name, harm',
    [
        (f'{ONLY}/logits', flip),
        (f'{ONLY}/logits', cut),
        (f'{ONLY}/logits', empty),
        (f'{ONLY}/margin', Path.unlink),
        (f'{ONLY}/manifest.json', cut),
        (f'{ONLY}/manifest.json', Path.unlink),
        (f'{ONLY}/manifest.json', edit(folder='of another')),
        (f'{ONLY}/manifest.json', sign(folder='of another')),
        ('meta.json', cut),
        ('meta.json', empty),
        ('meta.json', Path.unlink),
        ('meta.json', sign(schema=0)),
        ('meta.json', sign(bounds=[0, 20, 41])),
        ('meta.json', lambda p: p.write_text('[]')),
        ('meta.json', edit(storage_dtype='bf16')),
        ('meta.json', edit(sha256=None)),
    ],
)
def test_a_broken_cache_is_made_again(task, teacher, tmp_path, name, harm):
    make_signal(task, teacher, tmp_path, KEY, tokens=64)
    harm(tmp_path / name)
    assert open_signal(tmp_path) is None
    counted = Counted(teacher)
    whole = task.batch('train', task.all)
    assert close(
        make_signal(task, counted, tmp_path, KEY, tokens=64)(whole),
        online_signal(task, teacher)(whole),
    )
    assert counted.calls


def test_a_reader_keeps_its_numbers_while_the_folder_is_made_again(task, teacher, tmp_path):
    whole = task.batch('train', task.all)
    reader = make_signal(task, teacher, tmp_path, KEY, tokens=64)
    before = reader(whole)['logits'].clone()
    with torch.no_grad():
        teacher.classifier.bias += 1
    other = make_signal(task, teacher, tmp_path, KEY | {'weights_sha256': 'w2'}, tokens=64)
    assert torch.equal(reader(whole)['logits'], before) and not torch.allclose(other(whole)['logits'], before)


@pytest.mark.parametrize('value', [0.25, float('nan')])
def test_finite_garbage_in_a_half_made_signal_is_made_again(task, teacher, tmp_path, value, monkeypatch):
    monkeypatch.setattr(T, 'PART', 1)
    with pytest.raises(KeyboardInterrupt):
        make_signal(task, Counted(teacher, fail_after=2), tmp_path, KEY, tokens=64)
    rows = np.memmap(tmp_path / ONLY / 'logits', np.float32, 'r+')
    rows[:] = value
    rows.flush()
    made = make_signal(task, teacher, tmp_path, KEY, tokens=64)
    whole = task.batch('train', task.all)
    assert close(made(whole), online_signal(task, teacher)(whole))


def test_batches_have_as_many_tokens_as_suit_the_device_and_the_key_does_not_know(tmp_path):
    assert (T.forward_tokens('cpu'), T.forward_tokens('cuda')) == (2048, 16384)
    task = Pairs(400)
    usual = Counted(tiny_teacher())
    first = make_signal(task, usual, tmp_path, KEY)
    assert usual.calls == len(T.micro_batches(task.all, task.lengths('train'), 2048)) > 1
    assert make_signal(task, usual, tmp_path, KEY, tokens=100).meta == first.meta


def test_seconds_of_an_interrupted_call_are_kept(task, teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(T, 'PART', 1)
    clock = itertools.count(1000)
    monkeypatch.setattr(T.time, 'monotonic', lambda: next(clock))
    with pytest.raises(KeyboardInterrupt):
        make_signal(task, Counted(teacher, fail_after=3), tmp_path, KEY, tokens=64)
    before = read_signed(tmp_path / ONLY / 'ledger.json')['state']['seconds']
    assert before >= 3
    assert make_signal(task, teacher, tmp_path, KEY, tokens=64).meta['teacher_s'] > before


# ---- shards ----


def by_ranks(task, folder, ranks, teachers, said=None, expected=(), **more):
    "Threads play the processes; what each of them made, or how it was interrupted."
    wait = threading.Barrier(ranks, timeout=60)
    made = {}
    said = [] if said is None else said

    def one(rank):
        workers = Workers(rank, ranks, wait.wait)
        try:
            made[rank] = make_signal(
                task, teachers[rank], folder, KEY | more, tokens=64, workers=workers, log=said.append
            )
        except BaseException as e:
            made[rank] = e
            wait.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    failed = [e for e in made.values() if isinstance(e, Exception) and not isinstance(e, expected)]
    # a rank that waits for one that failed has a broken barrier
    for e in sorted(failed, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise e
    return made


def counted(n, **more):
    return [Counted(tiny_teacher(), **more) for _ in range(n)]


@pytest.mark.parametrize('kind', [Pairs, lambda: EachToken()], ids=['an example', 'a token'])
def test_a_signal_is_the_same_whoever_made_it(kind, tmp_path):
    task = kind()
    [alone] = by_ranks(task, tmp_path / '1', 1, counted(1)).values()
    orders = [np.arange(41), np.arange(41)[::-1].copy(), np.array([40, 0, 40, 20, 21]), np.array([13])]
    for ranks in (2, 3, 5):
        shared = by_ranks(task, tmp_path / str(ranks), ranks, counted(ranks))[0]
        assert len(shared.meta['bounds']) == ranks + 1
        tokens = [
            task.lengths('train')[a:b].sum() for a, b in zip(shared.meta['bounds'], shared.meta['bounds'][1:])
        ]
        assert max(tokens) - min(tokens) <= 2 * 24
        for index in orders:
            batch = task.batch('train', index)
            # the states of tokens are logits times ids of up to 30,000, and other batches round otherwise
            bound = dict(relative=1e-5, absolute=1e-5 if kind is Pairs else 1e-3)
            assert close(shared(batch), alone(batch), bound)
        # nobody of another number of ranks makes it again
        again = counted(2)
        assert by_ranks(task, tmp_path / str(ranks), 2, again)[1].meta == shared.meta
        assert not any(t.calls for t in again)


def named_shards(folder) -> list[Path]:
    "In the order of their examples."
    return sorted(
        (p for p in folder.glob('shard-*') if p.is_dir()), key=lambda path: int(path.name.split('-')[1])
    )


@pytest.mark.parametrize(
    'harm',
    [
        shutil.rmtree,
        lambda shard: flip(shard / 'margin'),
        lambda shard: (shard / 'logits').unlink(),
        lambda shard: cut(shard / 'manifest.json'),
    ],
)
@pytest.mark.parametrize('ranks', [1, 2])
def test_a_lost_shard_alone_is_made_again(task, tmp_path, harm, ranks):
    first = by_ranks(task, tmp_path, 3, counted(3))[0]
    whole = task.batch('train', task.all)
    right = {name: value.clone() for name, value in first(whole).items()}
    before, lost, after = named_shards(tmp_path)
    others = {p: p.stat().st_mtime_ns for of in (before, after) for p in of.iterdir()}
    harm(lost)
    assert open_signal(tmp_path) is None
    said = []
    teachers = counted(ranks)
    made = by_ranks(task, tmp_path, ranks, teachers, said)[0]
    assert close(made(whole), right) and len(said) == 1
    assert f'{lost} is missing or not what was written: this shard alone is made again' in said[0]
    begin, end = made.meta['bounds'][1:3]
    lengths = task.lengths('train')
    assert sum(t.calls for t in teachers) == len(T.micro_batches(np.arange(begin, end), lengths, 64))
    assert others == {p: p.stat().st_mtime_ns for p in others}
    assert made.meta['teacher_s'] < first.meta['teacher_s'] + 60


def test_a_shard_of_another_corpus_is_not_believed(task, tmp_path):
    "Put there by hand, whole, with as many rows."
    right = by_ranks(task, tmp_path / 'a', 2, counted(2))[0](task.batch('train', task.all))
    by_ranks(task, tmp_path / 'b', 2, counted(2), corpus_sha256='another')
    own, stranger = (named_shards(tmp_path / name)[0] for name in 'ab')
    shutil.rmtree(own)
    shutil.copytree(stranger, own)
    assert open_signal(tmp_path / 'a') is None
    said = []
    made = by_ranks(task, tmp_path / 'a', 1, counted(1), said)[0]
    assert close(made(task.batch('train', task.all)), right)
    assert len(said) == 1 and str(own) in said[0]


@pytest.mark.parametrize('later', [1, 2, 4])
def test_an_interrupted_call_is_gone_on_with_by_any_number_of_ranks(task, tmp_path, later, monkeypatch):
    monkeypatch.setattr(T, 'PART', 1)
    whole = counted(3)
    by_ranks(task, tmp_path / 'whole', 3, whole)
    first = [*counted(2), *counted(1, fail_after=2)]  # rank 2 is interrupted, and the others are done
    made = by_ranks(task, tmp_path / 'half', 3, first, expected=threading.BrokenBarrierError)
    assert isinstance(made[2], KeyboardInterrupt) and open_signal(tmp_path / 'half') is None
    again = counted(later)
    signal = by_ranks(task, tmp_path / 'half', later, again)[0]
    assert 0 < sum(t.calls for t in again) < whole[2].calls, 'whole shards and written parts stay'
    batch = task.batch('train', task.all)
    assert close(signal(batch), online_signal(task, again[0].inner)(batch))
    assert sorted(p.name for p in (tmp_path / 'half').iterdir()) == sorted(
        p.name for p in (tmp_path / 'whole').iterdir()
    )


def test_fewer_examples_than_ranks(tmp_path):
    for n in (1, 2):
        few = Pairs(n)
        made = by_ranks(few, tmp_path / str(n), 4, counted(4))
        batch = few.batch('train', few.all)
        online = online_signal(few, tiny_teacher())(batch)
        assert all(close(signal(batch), online) for signal in made.values())


def test_a_call_does_not_look_at_the_whole_corpus(teacher, tmp_path, monkeypatch):
    "No array that a call makes is longer than what it was asked for."
    task = EachToken(400)
    signal = by_ranks(task, tmp_path, 2, counted(2))[0]
    longest = []
    for name in ('concatenate', 'arange', 'empty', 'ones', 'repeat', 'searchsorted'):
        plain = getattr(np, name)

        def seen(*args, plain=plain, **more):
            longest.append(len(np.atleast_1d(found := plain(*args, **more))))
            return found

        monkeypatch.setattr(T.np, name, seen)
    signal(task.batch('train', np.array([3, 390])))
    assert longest and max(longest) < 100


# ---- what cannot be stored ----


@pytest.mark.parametrize(
    'spec, value, dtype, words',
    [
        (SignalSpec((2,)), float('nan'), 'fp32', 'is not finite; train the teacher again'),
        (SignalSpec((2,)), float('inf'), 'bf16', 'is not finite'),
        (SignalSpec((2,)), 1e5, 'fp16', 'does not fit fp16; use signal_dtype=fp32'),
        (SignalSpec((2,), ragged=True), float('nan'), 'fp32', 'is not finite'),
        (SignalSpec((2,), integer=True), 2**31, 'fp32', 'does not fit int32'),
        (SignalSpec((2,), integer=True), -(2**31) - 1, 'fp32', 'does not fit int32'),
    ],
)
def test_what_cannot_be_stored_is_told_by_its_example(task, teacher, tmp_path, spec, value, dtype, words):
    def said(outputs, batch):
        real = batch.inputs['attention_mask'].bool()
        of = torch.from_numpy(batch.index)
        of = of[:, None].expand(real.shape)[real] if spec.ragged else of
        return {'said': torch.where(of == 17, value, 1)[:, None].expand(-1, 2)}

    task.signal_spec, task.signal = {'said': spec}, said
    with pytest.raises(SignalError, match=f"'said' for example 17 of 'train' {words}") as e:
        make_signal(task, teacher, tmp_path, KEY | {'storage_dtype': dtype})
    assert '\n' not in str(e.value) and open_signal(tmp_path) is None
    task.signal_spec = {'said': SignalSpec((3,), spec.ragged, spec.integer)}
    with pytest.raises(SignalError, match=r"the signal 'said' of \d+ examples has the shape \(\d+, 2\)"):
        make_signal(task, teacher, tmp_path, KEY)


def test_a_full_disk(task, teacher, tmp_path, monkeypatch):
    def add(self, arrays):
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(Writer, 'add', add)
    with pytest.raises(SignalError, match='could not be written .*No space left'):
        make_signal(task, teacher, tmp_path, KEY)
    monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: SimpleNamespace(free=10))
    with pytest.raises(FileError, match="a teacher's outputs take about 0.0 MB .* signal=online"):
        make_signal(task, teacher, tmp_path / 'new', KEY)
    assert open_signal(tmp_path) is None


# ---- one row a token, and integers ----


class EachToken(Pairs):
    "A number and a likeliest word for every token, a class for every pair."

    signal_spec = {
        'logits': SignalSpec((2,)),
        'states': SignalSpec((2,), ragged=True),
        'words': SignalSpec((), ragged=True, integer=True),
        'classes': SignalSpec((1,), integer=True),
    }
    big = 2**24 + 1  # no float32

    def signal(self, outputs, batch):
        real = batch.inputs['attention_mask'].bool()
        ids = batch.inputs['input_ids']
        spread = outputs.logits[:, None] * ids[..., None]
        likeliest = outputs.logits.argmax(1, keepdim=True)
        return {
            'logits': outputs.logits,
            'states': spread[real],
            'words': (ids * self.big * (1 - 2 * likeliest))[real],
            'classes': likeliest,
        }


EACH = EachToken.signal_spec
EACH_EXACT = dict(relative=0.0, absolute=1e-3)


def same_as_online(signal, task, teacher, index, bound=EACH_EXACT) -> bool:
    batch = task.batch('train', np.asarray(index))
    cached = signal(batch)
    online = online_signal(task, teacher)(batch)
    assert {k: (v.shape, v.dtype) for k, v in cached.items()} == {
        k: (v.shape, v.dtype) for k, v in online.items()
    }
    assert all(torch.equal(cached[name], online[name]) for name, spec in EACH.items() if spec.integer)
    return close(cached, online, bound)


ORDERS = [np.arange(41), np.arange(41)[::-1].copy(), [40, 40, 0], [5]]


@pytest.mark.parametrize('dtype, relative', [('fp32', 1e-6), ('fp16', 2**-11), ('bf16', 2**-8)])
def test_rows_of_tokens_and_integers_are_what_is_computed_online(teacher, tmp_path, dtype, relative):
    task = EachToken()
    signal = make_signal(task, teacher, tmp_path, KEY | {'storage_dtype': dtype}, tokens=100)
    bound = dict(relative=relative, absolute=1e-2)
    assert all(same_as_online(signal, task, teacher, index, bound) for index in ORDERS)
    assert open_signal(tmp_path).meta == signal.meta
    some = signal(task.batch('train', np.array([7, 3])))
    n = task.lengths('train')
    assert some['states'].shape == (n[7] + n[3], 2) and some['words'].dtype == torch.int64
    assert some['words'].abs().max() > 2**26, 'a float32 would have rounded them'
    assert not torch.equal(some['words'][: n[7]], some['words'][n[3] :]), 'in the order of the batch'


@pytest.mark.exhaustive
def test_rows_of_tokens_go_on_after_an_interruption(teacher, tmp_path, monkeypatch):
    monkeypatch.setattr(T, 'PART', 1)
    task = EachToken()
    counted = Counted(teacher)
    make_signal(task, counted, tmp_path / 'whole', KEY, tokens=64)
    with pytest.raises(KeyboardInterrupt):
        make_signal(task, Counted(teacher, fail_after=3), tmp_path / 'torn', KEY, tokens=64)
    assert open_signal(tmp_path / 'torn') is None
    again = Counted(teacher)
    signal = make_signal(task, again, tmp_path / 'torn', KEY, tokens=64)
    assert 0 < again.calls < counted.calls
    assert all(same_as_online(signal, task, teacher, index) for index in ORDERS)
    flip(tmp_path / 'torn' / ONLY / '_offsets')
    assert open_signal(tmp_path / 'torn') is None


@pytest.mark.parametrize('kind', [Pairs, lambda: EachToken()], ids=['an example', 'a token'])
@pytest.mark.parametrize('later', [32, 256])
def test_a_resume_with_other_batches_finds_every_example(teacher, tmp_path, monkeypatch, kind, later):
    "As on another device, where a forward takes more tokens or fewer."
    monkeypatch.setattr(T, 'PART', 100)
    task = kind()
    with pytest.raises(KeyboardInterrupt):
        make_signal(task, Counted(teacher, fail_after=5), tmp_path, KEY, tokens=64)
    assert (tmp_path / ONLY / 'ledger.json').exists()
    signal = make_signal(task, teacher, tmp_path, KEY, tokens=later)
    if kind is Pairs:
        whole = task.batch('train', task.all)
        assert close(signal(whole), online_signal(task, teacher)(whole))
    else:
        assert all(same_as_online(signal, task, teacher, index) for index in ORDERS)


def one_process(store, rank, ranks, folder, start, said):
    "A rank of a run, in a process of its own; says how often it called the teacher."
    torch.set_num_threads(1)

    def barrier():
        return None

    if ranks > 1:
        dist.init_process_group(
            'gloo', init_method=f'file://{store}', rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        barrier = dist.barrier
    task = Pairs()
    teacher = Counted(tiny_teacher())
    start.wait(60)
    signal = make_signal(task, teacher, folder, KEY, tokens=64, workers=Workers(rank, ranks, barrier))
    whole = task.batch('train', task.all)
    said.put((ranks, teacher.calls, close(signal(whole), online_signal(task, teacher.inner)(whole))))
    if ranks > 1:
        dist.destroy_process_group()


def test_two_runs_at_once_make_it_once(tmp_path):
    "A run of two processes and a run of one on one folder: one of them makes the signal, all read it."
    fork = multiprocessing.get_context('fork')  # importing torch three times would take longer than the test
    said = fork.Queue()
    start = fork.Barrier(3)
    processes = [
        fork.Process(
            target=one_process, args=(tmp_path / 'store', rank, ranks, tmp_path / 'signal', start, said)
        )
        for rank, ranks in ((0, 2), (1, 2), (0, 1))
    ]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
    assert [p.exitcode for p in processes] == [0, 0, 0]
    heard = [said.get(timeout=10) for _ in processes]
    assert all(right for _, _, right in heard)
    calls = {ranks: [n for r, n, _ in heard if r == ranks] for ranks in (1, 2)}
    # one run made it with all its ranks, the other with none
    assert sorted((all(c), any(c)) for c in calls.values()) == [(False, False), (True, True)], calls
