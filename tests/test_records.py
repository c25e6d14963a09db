"""Records survive kills, refuse what they cannot read, and make the same evidence twice."""

import gzip
import json
import os
import re
import select
import subprocess
import sys
import numpy as np
import pandas as pd
import pytest
from handmade import make_record
from kdnotes.results import runs as L
from kdnotes.results import store as R
from kdnotes.core.files import BusyError
from kdnotes.results import schema as S
from kdnotes.results.runs import RunFolder
from kdnotes.results.schema import SCHEMA, RecordError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    return tmp_path


def a_record(run_id='baseline-s0-aa', study='s', seed=0, **changes):
    return make_record('baseline', seed, study=study) | dict(run_id=run_id) | changes


def some_units(seed=0, n=3):
    values = np.random.default_rng(seed).random(n)
    return pd.DataFrame(
        dict(
            split='test',
            set='clean',
            unit=[f'0{i}' for i in range(n)],
            cluster='NA',
            metric='map',
            value=values,
        )
    )


def some_predictions():
    return pd.DataFrame(
        dict(split='test', unit='00', item=['1', '2'], label=[0, 1], score=np.float32([1 / 3, 1 / 3 + 1e-7]))
    )


def finish(run_id='baseline-s0-aa', study='s', seed=0, model=(), **changes):
    run = RunFolder(study, run_id).create()
    for name in model:
        (run.path / 'model').mkdir(exist_ok=True)
        (run.path / 'model' / name).write_text(f'the {name} of a model')
    run.write_table('units', some_units(seed))
    run.write_table('predictions', some_predictions())
    run.write_record(a_record(run_id, study, seed, **changes))
    run.write_state('done')
    return run


def evidence(home):
    return {p.name: p.read_bytes() for p in sorted((home / 'thesis' / 'data').iterdir())}


# the run's folder


def test_a_run_is_done_only_with_its_record(home):
    run = RunFolder('s', 'r').create()
    run.write_state('running')
    run.append('checkpoint', step=1, path='c')
    run.write_table('units', some_units())
    (run.path / '.record.json.1a2b.tmp').write_text('{"schema": 1, "run_id": "r"')  # killed before the rename
    assert not run.done and run.record() is None and R.find_record('r') is None and R.records('s') == []
    with pytest.raises(RecordError, match="study 's' has no finished run in"):
        R.export('s')
    assert not (home / 'thesis').exists()


# another schema


def test_another_schema_is_refused_by_name_and_left_alone(home):
    run = finish()
    path = run.path / 'record.json'
    path.write_text(json.dumps(a_record(schema=0)))
    (run.path / 'state.json').unlink()
    before = path.read_bytes()
    for use in (
        run.record,
        run.create,
        lambda: R.find_record(run.run_id),
        lambda: R.records('s'),
        lambda: R.export('s'),
    ):
        with pytest.raises(RecordError) as e:
            use()
        for part in (str(path), 'schema 0', f'schemas 2 to {SCHEMA}', 'move it away'):
            assert part in str(e.value)
        assert '\n' not in str(e.value)
    assert path.read_bytes() == before and not (home / 'thesis').exists()


def test_evidence_of_another_schema_is_not_overwritten(home):
    finish()
    path = home / 'thesis' / 'data' / 's.records.jsonl'
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({'schema': 0, 'run_id': 'older'}) + '\n')
    before = evidence(home)
    with pytest.raises(RecordError, match='s.records.jsonl line 1 has schema 0'):
        R.export('s')
    assert evidence(home) == before
    assert R.find_record('baseline-s0-aa') is not None  # another run is still found


def test_the_schema_before_is_read_through_its_migration(monkeypatch):
    monkeypatch.setitem(S.MIGRATIONS, 0, lambda old: a_record(run_id=old['name']))
    run = RunFolder('s', 'x')
    run.path.mkdir(parents=True)
    (run.path / 'record.json').write_text('{"schema": 0, "name": "x"}')
    assert run.record() == a_record(run_id='x')


# rows


def test_a_row_is_one_write(monkeypatch):
    run = RunFolder('s', 'r').create()
    written = []
    write = os.write
    monkeypatch.setattr(L.os, 'write', lambda fd, data: written.append(data) or write(fd, data))
    run.append('checkpoint', step=0, path='c')
    assert len(written) == 1 and written[0].endswith(b'\n')


def test_a_full_disk_is_told(monkeypatch):
    run = RunFolder('s', 'r').create()
    run.append('checkpoint', step=0, path='c')
    write = os.write
    with monkeypatch.context() as m:
        m.setattr(L.os, 'write', lambda fd, data: write(fd, data[:9]))
        with pytest.raises(RecordError, match='disk is full'):
            run.append('checkpoint', step=1, path='c')
    run.append('checkpoint', step=2, path='c')
    assert [r['step'] for r in run.rows()] == [0, 2]


def test_two_writers_do_not_mix_their_lines():
    run = RunFolder('s', 'r').create()
    code = (
        "import sys; from kdnotes.results.runs import RunFolder\nfor i in range(300): RunFolder('s', "
        "'r').append('checkpoint', step=i, path=sys.argv[1] * 200)"
    )
    writers = [subprocess.Popen([sys.executable, '-c', code, name]) for name in 'ab']
    assert [w.wait() for w in writers] == [0, 0]
    rows = run.rows('checkpoint')
    for name in 'ab':
        assert [r['step'] for r in rows if r['path'][0] == name] == list(range(300))


def test_a_diverged_loss_is_null_not_nan():
    run = RunFolder('s', 'r').create()
    run.append(
        'step',
        step=1,
        epoch=0.0,
        loss=float('nan'),
        losses={'hard': np.float32('inf')},
        learning_rate=1e-4,
        grad_norm=np.float32(2),
        examples=1,
        tokens=1,
        elapsed_s=1.0,
    )
    assert (
        b'NaN' not in (run.path / 'rows.jsonl').read_bytes()
        and b'Infinity' not in (run.path / 'rows.jsonl').read_bytes()
    )
    (row,) = run.rows()
    assert row['loss'] is None and row['losses'] == {'hard': None} and row['grad_norm'] == 2


# tables


def test_tables_do_not_depend_on_the_clock(home, monkeypatch):
    run = RunFolder('s', 'r').create()
    bytes_at = []
    for now in (0.0, 2e9):
        monkeypatch.setattr('time.time', lambda now=now: now)
        run.write_table('units', some_units())
        bytes_at.append((run.path / 'units.csv.gz').read_bytes())
    assert bytes_at[0] == bytes_at[1]


def test_a_cut_table_is_named():
    run = finish('r-a')
    path = run.path / 'units.csv.gz'
    path.write_bytes(path.read_bytes()[:-6])
    with pytest.raises(RecordError, match='units.csv.gz is not what its run wrote.* kdnotes forget s r-a'):
        R.units('s')
    state = run.state()
    record = run.record()
    (run.path / 'record.json').write_text(json.dumps(record | dict(files={})))
    run.write_state('done')  # as of a run that bound nothing
    with pytest.raises(RecordError, match='units.csv.gz cannot be read'):
        R.units('s')
    assert 'record_sha256' in state


@pytest.mark.parametrize('change', [dict(seed=9), dict(time={'train_s': 1e6}), dict(parallel={'ranks': -3})])
def test_a_changed_record_is_refused(change):
    run = finish('r-a')
    record = run.record()
    changed = {k: record[k] | v if isinstance(v, dict) else v for k, v in change.items()}
    (run.path / 'record.json').write_text(json.dumps(record | changed))
    for read in (run.record, lambda: R.records('s'), lambda: R.export('s'), lambda: R.find_record('r-a')):
        with pytest.raises(RecordError, match='record.json is not what its run wrote'):
            read()


def test_a_changed_model_is_refused_where_it_is_loaded():
    run = finish('r-a', model=['config.json', 'model.safetensors'])
    assert R.checked_run_model('r-a') == run.path / 'model'
    for name in ('config.json', 'model.safetensors'):
        file = run.path / 'model' / name
        before = file.read_text()
        file.write_text(before.replace('the', 'thE'))
        with pytest.raises(RecordError, match=f'{name} is not what its run wrote.*kdnotes forget s r-a'):
            R.checked_run_model('r-a')
        file.write_text(before)
    assert R.checked_run_model('r-a') == run.path / 'model'


# evidence


def test_evidence_of_runs_that_were_asked_different_things_can_be_read(home):
    "Blocks of another length, or a corpus that has grown."
    import shutil

    other = RunFolder('s', 'r-b').create()
    other.write_table('units', some_units(1))
    other.write_table('predictions', some_predictions().assign(unit='01'))
    other.write_record(a_record('r-b', 's', 1))
    other.write_state('done')
    for run in (finish('r-a'), other):
        R.export('s')
        shutil.rmtree(run.path)
    found = R.predictions('s')
    assert found[found['run_id'] == 'r-a']['unit'].tolist() == ['00', '00']
    assert found[found['run_id'] == 'r-b']['unit'].tolist() == ['01', '01']
    np.testing.assert_allclose(found['score'], [1 / 3] * 4, rtol=1e-4)


@pytest.mark.parametrize('name', ['records.jsonl', 'units.csv.gz', 'predictions.csv.gz'])
def test_changed_evidence_is_refused(home, name):
    import shutil

    shutil.rmtree((finish('r-a'), R.export('s'))[0].path)
    path = home / 'thesis' / 'data' / f's.{name}'
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(RecordError, match=f's.{name} is not what was exported'):
        R.records('s')
        R.units('s')
        R.predictions('s')


def as_of_older_evidence(home):
    "Take away what evidence from before sums had not."
    folder = home / 'thesis' / 'data'
    (folder / 's.sha256').unlink()
    path = folder / 's.records.jsonl'
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({k: v for k, v in record.items() if k != 'files'}) for record in records]
    path.write_text('\n'.join(lines) + '\n')


def only_exported(home, *run_ids):
    "Runs of which only the evidence is left; its folder."
    import shutil

    for i, run_id in enumerate(run_ids):
        shutil.rmtree((finish(run_id, seed=i), R.export('s'))[0].path)
    return home / 'thesis' / 'data'


def read_all():
    R.records('s')
    R.units('s')
    R.predictions('s')


@pytest.mark.parametrize(
    'damage',
    [
        lambda b: b'',
        lambda b: b''.join(line for line in b.splitlines(True) if b'units' not in line),
        lambda b: b.replace(b'units', b'un\xffts'),
        lambda b: b[: len(b) // 2],
    ],
    ids=['emptied', 'a line deleted', 'no UTF-8', 'torn'],
)
def test_damaged_sums_do_not_switch_the_check_off(home, damage):
    folder = only_exported(home, 'r-a')
    sums = folder / 's.sha256'
    sums.write_bytes(damage(sums.read_bytes()))
    path = folder / 's.units.csv.gz'
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()).replace(b'0.', b'1.')))
    before = evidence(home)
    for use in (read_all, lambda: R.export('s')):
        with pytest.raises(RecordError, match='is not what was exported') as e:
            use()
        assert '\n' not in str(e.value) and 'git checkout' in str(e.value)
    assert evidence(home) == before


def test_evidence_from_before_its_sums_is_read(home):
    only_exported(home, 'r-a')
    as_of_older_evidence(home)
    read_all()


def test_evidence_that_lost_its_records_is_not_overwritten(home):
    folder = only_exported(home, 'r-a')
    (folder / 's.records.jsonl').unlink()
    before = evidence(home)
    finish('r-b')
    for use in (lambda: R.export('s'), lambda: R.records('s'), lambda: R.forget('s', ['r-b'])):
        with pytest.raises(RecordError, match='s.records.jsonl is not there, though'):
            use()
    assert evidence(home) == before


@pytest.mark.exhaustive
@pytest.mark.parametrize('first', ['nothing', 'evidence', 'older'])
@pytest.mark.parametrize('at', range(6))
def test_an_export_or_a_forgetting_can_be_cut_anywhere(home, monkeypatch, first, at):
    """Before each change of a file, and with the folders gone afterwards: what was evidence is read again."""
    if first != 'nothing':
        only_exported(home, 'r-a')
    if first == 'older':
        as_of_older_evidence(home)
    finish('r-b', seed=1)
    changes = []

    def counted(usual):
        def change(*args, **kwargs):
            if len(changes) == at:
                raise KeyboardInterrupt
            changes.append(args)
            return usual(*args, **kwargs)

        return change

    usual = ['r-a'] if first != 'nothing' else []
    for act, after in (
        (lambda: R.export('s'), {'r-b', *usual}),
        (lambda: R.forget('s', [*usual, 'r-b']), set()),
    ):
        changes.clear()
        with monkeypatch.context() as m:
            m.setattr(R, 'atomic_write', counted(R.atomic_write))
            m.setattr(R.Path, 'unlink', counted(R.Path.unlink))
            try:
                act()
            except KeyboardInterrupt:
                pass
        read_all()
        known = {r['run_id'] for r in R.records('s')}
        if after:
            assert known == after
            R.export('s')
        elif known:
            R.forget('s', known)  # those that are still there
        assert {r['run_id'] for r in R.records('s')} == after
    finish('r-c', seed=2)
    R.export('s')
    assert [r['run_id'] for r in R.records('s')] == ['r-c'] and len(
        evidence(home)['s.sha256'].splitlines()
    ) == 3


def test_the_order_of_runs_and_exports_does_not_matter(home, tmp_path, monkeypatch):
    made = []
    for order in ([0, 1, 2], [2, 0, 1]):
        monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / str(order[0])))
        for i in order:
            finish(f'r-{i}', seed=i)
            R.export('s')
        made.append(evidence(tmp_path / str(order[0])))
    assert made[0] == made[1]


def test_a_forgotten_run_leaves_the_evidence_as_if_it_had_never_been(home):
    finish('r-a')
    R.export('s')
    before = evidence(home)
    run = finish('r-b', seed=1)
    R.export('s')
    assert evidence(home) != before and R.forget('s', ['r-b']) == ([], [])
    assert evidence(home) == before and R.find_record('r-b') is None and not run.path.exists()
    # put aside, not deleted
    assert [p.name for p in (home / 'runs' / '.forgotten' / 's').glob('r-b-*/record.json')] == ['record.json']
    R.export('s')
    assert evidence(home) == before  # and it stays forgotten


def test_forgetting_what_is_not_there_or_being_made_changes_nothing(home):
    other = finish('r-0', seed=1)
    run = finish('r-a')
    R.export('s')
    before = evidence(home)
    with pytest.raises(R.ConfigError, match="no run r-x; it has r-0, r-a"):
        R.forget('s', ['r-a', 'r-x'])
    with L.lock_run(run), pytest.raises(BusyError):
        R.forget('s', ['r-0', 'r-a'])
    assert evidence(home) == before and run.done and other.done


def test_a_failed_run_can_be_forgotten(home):
    finish('r-0', seed=1)
    failed = RunFolder('s', 'r-f')
    failed.path.mkdir(parents=True)
    (failed.path / 'config.json').write_text('{}')
    failed.write_state('failed', reason='out of memory')
    assert R.forget('s', ['r-f']) == ([], []) and not failed.path.exists()
    assert [p.name for p in (home / 'runs' / '.forgotten' / 's').glob('r-f-*/state.json')] == ['state.json']
    assert [r['run_id'] for r in R.records('s')] == ['r-0']


@pytest.mark.parametrize(
    'spoil', [lambda text: text.replace('"seed": 0', '"seed": 7'), lambda text: text[:99]]
)
def test_a_run_whose_record_is_damaged_can_be_forgotten(home, spoil):
    finish('r-0', seed=1)
    run = finish('r-a')
    run.write_state('done')
    R.export('s')
    record = run.path / 'record.json'
    record.write_text(spoil(record.read_text()))
    with pytest.raises(R.RecordError, match='is not what its run wrote.*kdnotes forget s r-a'):
        R.export('s')
    assert R.forget('s', ['r-a']) == ([], [])
    assert [r['run_id'] for r in R.records('s')] == ['r-0'] and not run.path.exists()


def test_rows_of_an_earlier_attempt_go_whatever_the_clock_says():
    run = RunFolder('s', 'r').create()
    for step in (1, 2, 3):
        run.append('resume', step=step, path='c')
    rows = run.path / 'rows.jsonl'
    rows.write_text(re.sub('"at_s": [0-9.]+', '"at_s": 9e12', rows.read_text()))
    run.append('resume', step=4, path='c')
    run.drop_rows(3)
    assert [row['step'] for row in run.rows()] == [4]


def test_a_refused_forgetting_changes_nothing(home):
    "A run that stays has a damaged table: nothing is moved, and both can be forgotten together."
    runs = [finish('r-a'), finish('r-b', seed=1)]
    R.export('s')
    for run in runs:
        path = run.path / 'predictions.csv.gz'
        path.write_bytes(path.read_bytes()[:-6])
    before = evidence(home)
    with pytest.raises(RecordError, match='nothing is forgotten.*r-b.*is not what its run wrote'):
        R.forget('s', ['r-a'])
    assert evidence(home) == before and all(run.done for run in runs)
    assert not (home / 'runs' / '.forgotten').exists()
    assert R.forget('s', ['r-a', 'r-b']) == ([], []) and evidence(home) == {}


@pytest.mark.parametrize(
    'stands',
    [
        dict(teacher_run_id='t', initial={}),
        dict(teacher_run_id=None, initial=dict(teacher_run_id='t')),
        dict(teacher_run_id=None, initial=dict(transfer_run_id='t')),
    ],
)
@pytest.mark.parametrize('study', ['s', 'u'])
def test_a_run_is_not_forgotten_under_one_that_is_trained_from_it(home, stands, study):
    teacher = finish('t')
    R.export('s')
    before = evidence(home)
    student = RunFolder(study, 'k').create()
    student.write_config(stands)
    with (
        L.lock_run(student),
        pytest.raises(RecordError, match=f't cannot be forgotten while .*/{study}/k is'),
    ):
        R.forget('s', ['t'])
    assert teacher.done and evidence(home) == before
    (home / 'runs' / 'broken' / 'x').mkdir(parents=True)
    for name in ('.lock', 'config.json'):
        (home / 'runs' / 'broken' / 'x' / name).write_text('{')
    R.forget('s', ['t'])  # the student is no longer trained
    assert not teacher.done


def test_what_stands_on_a_forgotten_run_and_who_else_has_it_is_told(home):
    finish('t'), finish('k', seed=1, teacher_run_id='t')
    for study in ('u', 'v'):
        finish('t', study)
    R.export('s')
    assert R.forget('s', ['t']) == (['u', 'v'], ['k'])


def test_a_folder_wins_over_its_older_copy(home):
    run = finish()
    R.export('s')
    run.write_record(a_record(params_total=2))
    run.write_state('done')
    assert R.records('s')[0]['params_total'] == 2
    R.export('s')
    assert len(R.records('s')) == 1 and b'"params_total":2' in evidence(home)['s.records.jsonl']


@pytest.mark.exhaustive
def test_export_waits_for_another_one(home):
    """An export holds the lock from reading to writing: otherwise a run between the two is lost."""
    finish('r-a')
    code = (
        "import sys; from kdnotes.results import store as R\nfound = R._find_runs\ndef slow(*args):\n    "
        "result = found(*args)\n    print('read', flush=True); sys.stdin.readline()\n    return "
        "result\nR._find_runs = slow\nR.export('s')"
    )
    first = subprocess.Popen(
        [sys.executable, '-c', code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline() == 'read\n'
    finish('r-b', seed=1)
    second = subprocess.Popen(
        [
            sys.executable,
            '-c',
            (
                "from kdnotes.results.store import export; print('go', flush=True); export('s'); "
                "print('out', flush=True)"
            ),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert second.stdout.readline() == 'go\n'
    # time in which a second export that does not wait would be through
    select.select([second.stdout], [], [], 1)
    first.communicate('\n' * 9)
    assert second.communicate()[0] == 'out\n' and first.returncode == second.returncode == 0
    assert len(evidence(home)['s.records.jsonl'].splitlines()) == 2


def test_weights_are_found_only_for_finished_runs():
    run = finish('r-a', study='teachers')
    (run.path / 'model').mkdir()
    assert R.find_run_model('r-a') is None
    (run.path / 'model' / 'model.safetensors').write_bytes(b'')
    assert R.find_run_model('r-a') == run.path / 'model'
    (run.path / 'record.json').unlink()
    assert R.find_run_model('r-a') is None


def test_records_without_their_units_are_told(home):
    import shutil

    shutil.rmtree((finish('r-a'), R.export('s'))[0].path)
    path = home / 'thesis' / 'data' / 's.units.csv.gz'
    text = gzip.decompress(path.read_bytes()).decode().splitlines()
    path.write_bytes(gzip.compress((text[0] + '\n').encode()))
    as_of_older_evidence(home)
    with pytest.raises(RecordError, match='no units of run r-a'):
        R.export('s')
