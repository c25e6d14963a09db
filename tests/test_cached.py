"Cached folders: kills, processes that compete, full disks, changed bytes; nothing torn is used."

import json
import random
import shutil
import subprocess
import time
import numpy as np
import pytest
import caches
from faults import files_no_larger_than
from kinds import one_of_each
from ranks import context, launch
from kdnotes.core import cached as module
from kdnotes.core.cached import Writer, cached, open_cached
from kdnotes.core.files import FileError, read_signed, write_signed


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    "The files of each kind, made in one go; and where they are made again."
    place = tmp_path_factory.mktemp('caches')
    caches.write_texts(place / 'corpus')
    found = {}

    def of(kind: str) -> dict[str, bytes]:
        if kind not in found:
            launch('caches:make', kind, place / kind)
            found[kind] = caches.files(place / kind)
            assert any(name.endswith('manifest.json') for name in found[kind])
        return found[kind]

    return place, of


def started(kind, home, **more):
    process = context.Process(target=caches.make, args=(kind, home), kwargs=more)
    process.start()
    return process


@pytest.mark.parametrize('kind', one_of_each(caches.KINDS))
def test_kills_at_random_moments_leave_nothing_torn(undisturbed, tmp_path, kind):
    "Four kills of each of five kinds, one after the other on the same folders."
    place, whole = undisturbed
    right = whole(kind)
    home = place / f'{kind} killed'
    rng = random.Random(kind)
    halves = 0
    for _ in range(4):
        begun = context.Event()
        added = context.Value('i', 0)
        process = started(kind, home, pause_s=0.02, begun=begun, added=added)
        assert begun.wait(120)
        until = rng.randrange(5)  # parts, and then a moment of the next one
        while added.value < until and process.is_alive():
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        process.join()
        halves += caches.files(home) != right
    assert halves, 'no kill came early enough'
    launch('caches:make', kind, home)
    assert caches.files(home) == right


@pytest.mark.parametrize('kind', one_of_each(caches.KINDS))
def test_one_of_several_processes_makes_it(undisturbed, kind):
    place, whole = undisturbed
    right = whole(kind)
    alone, both = context.Value('i', 0), context.Value('i', 0)
    processes = [started(kind, place / f'{kind} alone', added=alone)]
    start = context.Barrier(3)
    processes += [
        started(kind, place / f'{kind} together', pause_s=0.01, start=start, added=both) for _ in range(3)
    ]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert caches.files(place / f'{kind} together') == right
    assert both.value == alone.value > 5


@pytest.mark.parametrize('kind', one_of_each(caches.KINDS))
def test_a_full_disk_is_one_sentence_and_costs_what_did_not_fit(undisturbed, tmp_path, kind):
    "A real one, which is too small for the arrays; with room again the next call ends the work."
    place, whole = undisturbed
    right = whole(kind)
    disk = place / f'{kind} disk'
    disk.mkdir()
    size = f'size={max(8, sum(map(len, right.values())) // 2048 * 4 // 4 * 4)}k'
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', size, 'tmpfs', str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f'no disk of its own here, which needs the rights of root: {mounted.stderr.decode()}')
    try:
        (disk / 'filled').write_bytes(bytes(4096))
        [said] = launch('test_cached:error_of', kind, disk)
        assert 'the disk' in said or 'No space left' in said or 'take about' in said, said
        assert 'free some' in said and '\n' not in said
        assert not [path for path in disk.rglob('manifest.json') if open_cached(path.parent) is None]
        subprocess.run(['mount', '-o', 'remount,size=64m', str(disk)], check=True)
        (disk / 'filled').unlink()
        launch('caches:make', kind, disk)
        assert caches.files(disk) == right
    finally:
        subprocess.run(['umount', '-l', str(disk)], check=True)


def error_of(kind, home) -> str:
    "The sentence that a maker ends in; '' where it does not."
    from kdnotes.core.config import KdnotesError

    try:
        caches.make(kind, home)
    except KdnotesError as e:
        return str(e)
    return ''


def test_arrays_are_resumed_wherever_the_kill_fell(tmp_path):
    [rows] = launch('caches:killed_at_each_sync', tmp_path)
    squares = [i * i for i in range(12)]
    for begun, total, values, odd, left in rows:
        assert values == squares and total == sum(squares)
        assert odd == [bool(value % 2) for value in squares]
        assert left == ['manifest.json', 'odd', 'squares'] and len(begun) <= 1
    resumed = [begun[0] for begun, *_ in rows if begun]
    assert resumed == sorted(resumed), 'a later kill must not lose more'
    assert set(resumed) == {0, 1, 2, 3}


# ---- one folder, by hand ----


def two_parts(writer, stop_at=None):
    for part in range(writer.parts, 2):
        if part == stop_at:
            raise KeyboardInterrupt
        writer.state['parts'] = part + 1
        writer.add(dict(rows=np.full((3, 2), part + 1, np.int16), flags=np.array([], bool)))


def test_what_is_written_is_read(tmp_path):
    made = cached(tmp_path / 'a', two_parts)
    for found in (made, open_cached(tmp_path / 'a')):
        assert found.state == dict(parts=2)
        assert found.arrays['rows'].tolist() == [[1, 1]] * 3 + [[2, 2]] * 3
        assert found.arrays['rows'].dtype == np.int16 and found.arrays['flags'].dtype == bool
        assert not found.arrays['rows'].flags.writeable and len(found.arrays['flags']) == 0


def test_the_first_part_says_the_type(tmp_path):
    writer = Writer(tmp_path / 'a')
    writer.add(dict(ids=np.array([1], np.uint16)))
    with pytest.raises(TypeError, match='Cannot cast'):
        writer.add(dict(ids=np.array([70_000], np.int32)))


def test_a_ledger_is_not_written_for_every_part(tmp_path, monkeypatch):
    "A corpus of ten million rows has five hundred parts of twenty files."
    synced = []
    monkeypatch.setattr(module, 'sync', lambda path: synced.append(path.name))

    def many(writer):
        for _ in range(100):
            writer.add(dict(rows=np.arange(3)))

    cached(tmp_path / 'a', many)
    assert len(synced) < 5


def test_a_folder_is_compared_once_while_it_does_not_change(tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'SETTLED_NS', 0)
    cached(tmp_path / 'a', two_parts)
    compared = []
    usual = module.sha256_file
    monkeypatch.setattr(module, 'sha256_file', lambda path: compared.append(path.name) or usual(path))
    for _ in range(3):
        assert open_cached(tmp_path / 'a')
    assert sorted(compared) == ['flags', 'rows']
    time.sleep(0.02)  # a file's time has steps
    (tmp_path / 'a' / 'rows').write_bytes(bytes(24))
    assert open_cached(tmp_path / 'a') is None


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-2])  # a file of JSON ends with a line


def of_another(path):
    write_signed(path, read_signed(path) | dict(folder='b'))


def edited(path):
    "It says where to go on: a part would be left out."
    path.write_text(path.read_text().replace('"parts": 1', '"parts": 2'))


@pytest.mark.parametrize('harm', (flip, cut_short, edited, of_another, lambda path: path.write_bytes(b'')))
@pytest.mark.parametrize('name', ('rows', 'known'))
@pytest.mark.parametrize('whole', (True, False))
def test_nothing_of_what_is_damaged_is_used(tmp_path, harm, name, whole):
    if harm is edited and whole or name == 'rows' and harm in (edited, of_another):
        pytest.skip('of a ledger alone, or of a manifest')
    folder = tmp_path / 'a'
    expected = cached(folder, two_parts).arrays['rows'].tolist()
    if not whole:
        shutil.rmtree(folder)
        with pytest.raises(KeyboardInterrupt):
            cached(folder, lambda writer: two_parts(writer, stop_at=1))
    (known,) = folder.glob('*.json')
    assert known.name == ('manifest.json' if whole else 'ledger.json')
    harm(known if name == 'known' else folder / name)
    begun = []
    made = cached(folder, lambda writer: begun.append(writer.parts) or two_parts(writer))
    assert begun == [0]
    assert made.arrays['rows'].tolist() == expected and made.state == dict(parts=2)


def test_half_a_part_is_cut_off_and_the_others_stay(tmp_path):
    expected = cached(tmp_path / 'a', two_parts).arrays['rows'].tolist()
    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path / 'b', lambda writer: two_parts(writer, stop_at=1))
    for name in ('rows', 'of a later part'):
        with open(tmp_path / 'b' / name, 'ab') as f:
            f.write(b'torn!')
    begun = []
    made = cached(tmp_path / 'b', lambda writer: begun.append(writer.parts) or two_parts(writer))
    assert (
        begun == [1] and made.arrays['rows'].tolist() == expected and made.arrays.keys() == {'rows', 'flags'}
    )
    assert not (tmp_path / 'b' / 'of a later part').exists()


@pytest.mark.parametrize('name', ['rows', 'manifest.json'])
def test_one_bit_is_noticed(tmp_path, name):
    cached(tmp_path / 'a', two_parts)
    whole = (tmp_path / 'a' / name).read_bytes()
    for i in range(0, len(whole), 7):
        (tmp_path / 'a' / name).write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        found = open_cached(tmp_path / 'a')
        assert found is None or json.loads((tmp_path / 'a' / name).read_bytes()) == json.loads(whole)
    assert cached(tmp_path / 'a', two_parts).state == dict(parts=2)


def test_a_folder_of_another_name_is_not_used(tmp_path):
    cached(tmp_path / 'a', two_parts)
    (tmp_path / 'a').rename(tmp_path / 'b')
    assert open_cached(tmp_path / 'b') is None


@pytest.mark.parametrize('size', (0, 10, 400))
def test_a_file_that_cannot_grow_is_one_sentence(tmp_path, size):
    with files_no_larger_than(size), pytest.raises(FileError, match='File too large; end other programs'):
        cached(tmp_path / 'a', two_parts)
    assert open_cached(tmp_path / 'a') is None
    assert cached(tmp_path / 'a', two_parts).state == dict(parts=2)
