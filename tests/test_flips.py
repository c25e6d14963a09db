"""One flipped bit anywhere in what a run leaves or keeps: it is refused in a sentence or made anew,
and never used.
"""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
import pytest
import torch
from small_runs import train_here, write_corpus, write_model
from test_teacher_signal import KEY, Counted, Pairs, tiny_teacher
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config, stored_config
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill import teacher_cache
from kdnotes.distill.teacher_cache import make_signal, open_signal
from kdnotes.experiment.launch import run
from kdnotes.results import store
from kdnotes.tasks.batching import encode_pairs

FLIPS = [40, pytest.param(500, marks=pytest.mark.exhaustive)]


def flip(file: Path, drawn: random.Random) -> None:
    "Flip a random bit."
    data = bytearray(file.read_bytes())
    data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
    file.write_bytes(data)


def flips(files: list[Path], n: int) -> Iterator[Path]:
    "The files in turn, each with a random bit flipped, which is put back afterwards."
    drawn = random.Random(n)
    for i in range(n):
        file = files[i % len(files)]
        before = file.read_bytes()
        flip(file, drawn)
        yield file
        file.write_bytes(before)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
    "A finished run, exported."
    home = tmp_path_factory.mktemp('home')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('KDNOTES_HOME', str(home))
        patch.setenv('CUDA_VISIBLE_DEVICES', '')
        train_here(patch)
        given = dict(
            corpus=str(write_corpus(home / 'corpus')),
            teacher=str(write_model(home / 'teacher')),
            max_length=64,
        )
        record = run(make_config(mode='baseline', smoke=True, **given))
        yield store.RunFolder('default', record['run_id'])


RESULTS = ('units.csv.gz', 'predictions.csv.gz', 'record.json')
EVIDENCE = ('units.csv.gz', 'predictions.csv.gz', 'records.jsonl')


def read() -> None:
    "All that is known of a study."
    store.records('default')
    store.units('default')
    store.predictions('default')


@pytest.mark.slow
@pytest.mark.parametrize('n', FLIPS)
def test_in_a_model(finished, n):
    assert store.checked_run_model(finished.run_id)
    for file in flips(
        [f for f in sorted((finished.path / 'model').iterdir()) if f.is_file() and f.name != 'README.md'], n
    ):
        with pytest.raises(KdnotesError, match=f'{file.name} is not what its run wrote'):
            store.checked_run_model(finished.run_id)


@pytest.mark.slow
@pytest.mark.parametrize('n', FLIPS)
def test_in_the_tables_and_the_record_of_a_run(finished, n):
    read()
    for _ in flips([finished.path / name for name in RESULTS], n):
        with pytest.raises(KdnotesError, match='is not what its run wrote'):
            read()


@pytest.mark.slow
def test_a_changed_config_of_the_weights_is_no_finished_run(finished):
    "The name of a run tells the weights that it starts from, and how they are read."
    file = finished.path.parents[2] / 'teacher' / 'config.json'
    usual = file.read_text()
    asked = stored_config(finished.config()['config'])
    assert run(asked)['run_id'] == finished.run_id
    file.write_text(usual.replace('"num_attention_heads": 2', '"num_attention_heads": 4'))
    assert file.read_text() != usual
    assert run(asked)['run_id'] != finished.run_id
    file.write_text(usual)
    assert run(asked)['run_id'] == finished.run_id


@pytest.mark.slow
@pytest.mark.parametrize('n', FLIPS)
def test_in_the_state_of_a_run(finished, n):
    "A state is no result: it is refused, or the run is as it was."
    usual = finished.record()
    for _ in flips([finished.path / 'state.json'], n):
        try:
            assert finished.record() == usual
        except KdnotesError:
            continue


@pytest.mark.slow
@pytest.mark.parametrize('n', FLIPS)
def test_in_exported_evidence(finished, n):
    store.export(finished.study)
    folder = store.evidence_path()
    shutil.move(finished.path, folder / 'aside')  # what is left is the evidence
    try:
        for file in flips([folder / f'default.{name}' for name in EVIDENCE], n):
            with pytest.raises(KdnotesError, match=f'{file.name} is not what was exported'):
                read()
    finally:
        shutil.move(folder / 'aside', finished.path)


@pytest.mark.parametrize('n', FLIPS)
def test_in_a_token_cache(tmp_path, n):
    tokenizer = load_tokenizer(write_model(tmp_path / 'teacher'))
    first = [f'abc {i} def' * (i + 1) for i in range(9)]
    second = [f'cab {i}' for i in range(9)]

    def encode():
        ids, start = encode_pairs(tokenizer, first, second, 32, tmp_path / 'tokens')
        return ids.values.tolist(), ids.offsets.tolist(), start.tolist()

    usual = encode()
    files = sorted((tmp_path / 'tokens').glob('*.tokens/*'))
    whole = {file: file.read_bytes() for file in files}
    for file in flips(files, n):
        assert encode() == usual
        # of the manifest the part that vouches for the others
        assert file.read_bytes() == whole[file] or file.name == 'manifest.json', 'made anew'


@pytest.mark.parametrize('n', FLIPS)
def test_in_a_stored_signal(tmp_path, n):
    task = Pairs()
    teacher = tiny_teacher()
    made = make_signal(task, teacher, tmp_path / 'signal', KEY, tokens=64)
    key = made.meta['key']
    assert open_signal(tmp_path / 'signal', key)
    files = [
        file for file in sorted((tmp_path / 'signal').rglob('*')) if file.is_file() and file.stat().st_size
    ]
    everything = task.batch('train', task.all)
    usual = made(everything)
    for _ in flips(files, n):
        opened = open_signal(tmp_path / 'signal', key)
        for name in usual if opened else ():
            assert torch.equal(opened(everything)[name], usual[name]), 'a bit that says nothing'


@pytest.mark.exhaustive
@pytest.mark.parametrize('n', FLIPS)
def test_in_a_half_made_signal(tmp_path, n, monkeypatch):
    monkeypatch.setattr(teacher_cache, 'PART', 1)
    task = Pairs()
    # wrapped throughout: a bare classifier computes its last layer at one position, which rounds otherwise
    teacher = Counted(tiny_teacher())
    usual = make_signal(task, teacher, tmp_path / 'whole', KEY, tokens=64)
    with pytest.raises(KeyboardInterrupt):
        make_signal(task, Counted(teacher.inner, fail_after=4), tmp_path / 'half', KEY, tokens=64)
    half = sorted(p.relative_to(tmp_path / 'half').as_posix() for p in (tmp_path / 'half').rglob('*.json'))
    half += [p.relative_to(tmp_path / 'half').as_posix() for p in (tmp_path / 'half').rglob('logits')]
    assert [Path(name).name for name in half] == ['meta.json', 'ledger.json', 'logits']
    for i in range(n):
        folder = shutil.copytree(tmp_path / 'half', tmp_path / f'half-{i}')
        flip(folder / half[i % len(half)], random.Random(i))
        made = make_signal(task, teacher, folder, KEY, tokens=64)
        everything = task.batch('train', task.all)
        for name, value in usual(everything).items():
            assert torch.equal(made(everything)[name], value)
