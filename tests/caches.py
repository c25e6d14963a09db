"One maker of each kind of cached folder, for processes that are killed or compete."

import json
import os
import time
from contextlib import suppress
from pathlib import Path
import numpy as np

PARTS = 12  # at least, of each kind


def write_texts(folder: Path) -> Path:
    "A corpus in many parts, with unlabelled rows, of which some are texts of dev and are left out."
    folder.mkdir(parents=True)
    for split, n in dict(train=300, dev=40, test=40, unlabelled=200).items():
        rows = [dict(text=f'{split[:3]} a b {i} ü', label=str(i % 3)) for i in range(n)]
        if split == 'unlabelled':
            rows = [
                dict(text=row['text'].replace('unl', 'dev') if i % 9 else f'own {i}')
                for i, row in enumerate(rows)
            ]
        (folder / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)) + '\n')
    return folder


def columns(home: Path) -> None:
    from kdnotes.core.files import cached_at
    from kdnotes.tasks import schema, sources

    schema.PART = sources.PART = 30
    sources.LARGE = 1
    with cached_at(home):
        corpus = sources.load_corpus('text_classification', str(home.parent / 'corpus'))
    assert corpus.left_out and len(corpus.unlabelled)


def tokens(home: Path) -> None:
    from letters import of_letters
    from kdnotes.tasks import batching

    batching.ROWS_AT_ONCE = 4
    texts = [' '.join('abcdefgh'[: 1 + i % 8]) for i in range(4 * PARTS)]
    batching.encode_pairs(of_letters(), texts, texts[::-1], 12, home / 'tokens')


def blocks(home: Path) -> None:
    from tiny_lm import tiny_tokenizer
    from kdnotes.tasks import text_blocks

    text_blocks.PIECE = 200
    texts = [' '.join(f'w{(i * j) % 60}' for j in range(20 + 30 * (i % 5))) for i in range(40)]
    text_blocks.token_stream(tiny_tokenizer(), texts, home / 'tokens')


def windows(home: Path) -> None:
    from letters import of_words
    from kdnotes.tasks import windows

    windows._AT_ONCE = 2
    words = [f'w{i}' for i in range(60)]
    contexts = [' '.join(words[i % 7 : 9 + i % 50]) for i in range(2 * PARTS)]
    rows = [dict(id=str(i), question='w1 w2', context=text, answers=()) for i, text in enumerate(contexts)]
    windows.encode_windows(of_words(words), rows, 16, 4, home / 'tokens')


def signals(home: Path) -> None:
    from test_teacher_signal import KEY, EachToken, tiny_teacher
    from kdnotes.distill import teacher_cache

    teacher_cache.PART = 20
    teacher_cache.make_signal(EachToken(), tiny_teacher(), home / 'signals' / 'key', KEY, tokens=64)


KINDS = dict(columns=columns, tokens=tokens, blocks=blocks, windows=windows, signals=signals)


def make(
    kind: str,
    home: Path,  # of its folders
    pause_s: float = 0.0,  # after each part, so that others meet it half made
    begun=None,  # an event that is set when all is imported
    start=None,  # a barrier to wait for
    added=None,  # a number that counts the parts of all processes
) -> None:
    "Make one kind, as each of several processes does."
    import torch
    from kdnotes.core import cached

    torch.set_num_threads(1)
    cached.LEDGER_EVERY_S = 0.0
    usual = cached.Writer.add

    def add(self, arrays):
        usual(self, arrays)
        if added is not None:
            with added.get_lock():
                added.value += 1
        time.sleep(pause_s)

    cached.Writer.add = add
    for module in ('kdnotes.tasks.sources', 'test_teacher_signal'):
        __import__(module)
    if begun:
        begun.set()
    if start:
        start.wait(120)
    KINDS[kind](home)


def files(home: Path) -> dict[str, bytes]:
    "What a maker has left, but locks and what it remembers of files; of a manifest all but the seconds."
    found = {}
    for path in sorted(home.rglob('*')):
        if path.is_dir() or path.suffix == '.lock' or path.parent.name == 'sha256':
            continue
        data = path.read_bytes()
        if path.name == 'manifest.json':
            known = json.loads(data)
            known.pop('sha256')
            known['state'].pop('seconds', None)
            data = json.dumps(known).encode()
        found[str(path.relative_to(home))] = data
    return found


# ---- the kill at each moment at which something reaches the disk ----


def squares(folder: Path):  # what the maker began with, and what is there
    "Three parts of two arrays."
    from kdnotes.core.cached import cached

    begun = []

    def make(writer):
        begun.append(writer.parts)
        for part in range(writer.parts, 3):
            values = np.arange(4 * part, 4 * part + 4) ** 2
            writer.state['total'] = writer.state.get('total', 0) + int(values.sum())
            writer.add(dict(squares=values, odd=values % 2 == 1))

    return begun, cached(folder, make)


def killed_at_each_sync(home: Path) -> list[list]:
    "Victims are forks of this process, each of which dies when its n-th fsync has taken hold."
    import signal
    from kdnotes.core import cached

    cached.LEDGER_EVERY_S = 0.0
    rows = []
    for n in range(1000):
        folder = home / str(n)
        child = os.fork()
        if child == 0:
            _die_at(n, signal.SIGKILL)
            with suppress(BaseException):
                squares(folder)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return rows
        begun, (arrays, state) = squares(folder)
        left = sorted(path.name for path in folder.iterdir())
        rows.append([begun, state['total'], arrays['squares'].tolist(), arrays['odd'].tolist(), left])
    raise AssertionError('there is no end of syncs')


def _die_at(n: int, signal: int) -> None:
    "Kill this process after its n-th fsync."
    usual = os.fsync
    calls = iter(range(1000))

    def fsync(fd):
        usual(fd)
        if next(calls) == n:
            os.kill(os.getpid(), signal)

    os.fsync = fsync
