"""No text of the real corpora is tracked in git:
none of their 8-grams stands in a tracked file, outputs of notebooks included.
"""

import csv
import gzip
import io
import json
import re
import subprocess
from itertools import chain, repeat
from pathlib import Path
import numpy as np
import pyarrow.csv
import pytest

ROOT = Path(__file__).resolve().parents[1]
N = 8
NOT_OURS = {
    'LICENSE',
    'constraints.txt',
    'constraints-cuda.txt',
}  # a licence, lists of versions
BINARY = {'.pdf', '.png', '.safetensors'}
# 8-grams that are everybody's, as 'eight words in lower case'; beside each, why
FAIR = {
    'in what year did robert louis stevenson die',  # made from the table of facts; SQuAD asks it, too
}
MIX = np.uint64(0x9E3779B97F4A7C15)

# lower case, else a blank
LETTERS = bytes(b if 97 <= b <= 122 or b > 127 else b + 32 if 65 <= b <= 90 else 32 for b in range(256))

# an id as SQuAD's questions have, by which our tables of predictions name them; E2 80 and E2 81 begin dashes
# and quotes
ID_OR_MARK = re.compile(rb'x?[0-9a-f]{20,}|\xe2[\x80\x81].', re.S)


def words(text: str) -> list[bytes]:
    """Letters only, lower case: numbers, marks and ids are nobody's text.
    In bytes, for the corpora have 11 million words.
    """
    return ID_OR_MARK.sub(b' ', text.encode(errors='replace')).translate(LETTERS).split()


def strings(node) -> str:
    "All strings of parsed JSON; lists of lines, as notebooks have them, are joined."
    if isinstance(node, str):
        return node
    if isinstance(node, dict):
        return '\n'.join(strings(v) for v in node.values())
    if isinstance(node, list):
        return ('' if all(isinstance(v, str) for v in node) else '\n').join(strings(v) for v in node)
    return ''


def cells(data: bytes) -> str:
    "Each text of a table once, since most of its rows repeat those of the others; numbers are nobody's text."
    table = pyarrow.csv.read_csv(io.BytesIO(data))
    texts = (column.unique().to_pylist() for column in table.columns if pyarrow.types.is_string(column.type))
    return '\n'.join(filter(None, chain.from_iterable(texts)))


def read(path: Path) -> str:
    "A file's text, unpacked, without the marks of its format."
    data = gzip.decompress(path.read_bytes()) if path.suffix == '.gz' else path.read_bytes()
    kind = path.name.removesuffix('.gz').rpartition('.')[2]
    if kind == 'csv':
        return cells(data)
    text = data.decode('utf-8', errors='replace')
    if kind in ('ipynb', 'json'):
        return strings(json.loads(text))
    if kind == 'jsonl':
        return '\n'.join(strings(json.loads(line)) for line in text.split('\n') if line.strip())
    return text


def corpus_text(path: Path) -> str:
    "The text that belongs to a corpus: no column names, no licence around a book."
    text = read(path)
    if path.suffix == '.tsv':
        return text.partition('\n')[2]
    if 'gutenberg' in path.parts:
        book = re.search(r'\*\*\* ?START OF.*?\*\*\*(.*)\*\*\* ?END OF', text, re.S)
        return book[1] if book else text
    return text


def hashes(ids: np.ndarray) -> np.ndarray:
    "One number for each window of N word numbers; 0 where a word is unknown."
    if len(ids) < N:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(ids, N)
    total = np.zeros(len(windows), np.uint64)
    for i in range(N):
        total = (total ^ windows[:, i]) * MIX + np.uint64(i)
    return np.where((windows == 0).any(axis=1), np.uint64(0), total)


def shared(ours: dict[str, str], corpora: list[Path]) -> list[str]:
    "Each 8-gram of our texts that a corpus has too, as 'file: words (corpus)'."
    vocabulary: dict[bytes, int] = {}
    ids = {
        name: np.array([vocabulary.setdefault(w, len(vocabulary) + 1) for w in words(text)], np.uint64)
        for name, text in ours.items()
    }
    mine = {name: hashes(i) for name, i in ids.items()}
    known = np.unique(np.concatenate(list(mine.values())))
    names = list(vocabulary)
    found = {}
    for path in corpora:
        theirs = hashes(np.fromiter(map(vocabulary.get, words(corpus_text(path)), repeat(0)), np.uint64))
        theirs = theirs[theirs > 0]
        where = np.searchsorted(known, theirs).clip(max=len(known) - 1)
        for h in set(theirs[known[where] == theirs].tolist()):
            found.setdefault(h, path.name)
    hits = []
    for name, h in mine.items():
        for i in np.flatnonzero(np.isin(h, np.array(list(found), np.uint64))):
            gram = b' '.join(names[int(w) - 1] for w in ids[name][i : i + N]).decode()
            if gram not in FAIR:
                hits.append(f'{name}: {gram!r} (in {found[int(h[i])]})')
    return hits


@pytest.fixture(scope='module')
def texts(real_corpora) -> list[Path]:
    "The files of the corpora, without what merely describes them."
    return [p for p in sorted(real_corpora.rglob('*')) if p.is_file() and p.suffix not in BINARY | {'.md'}]


def test_no_tracked_file_has_eight_words_in_a_row_of_a_corpus(texts):
    git = subprocess.run(['git', 'ls-files', '-z'], cwd=ROOT, capture_output=True, text=True)
    if git.returncode:
        pytest.skip('not a git checkout: no file is tracked')
    names = [
        n
        for n in git.stdout.split('\0')
        if n and n not in NOT_OURS and Path(n).suffix not in BINARY and (ROOT / n).is_file()
    ]
    assert shared({n: read(ROOT / n) for n in names}, texts) == []


def test_a_copied_sentence_is_found(corpora, texts):
    if not (tsv := corpora / 'wikiqa' / 'WikiQA-dev.tsv').exists():
        pytest.skip('no WikiQA here')
    with open(tsv, encoding='utf-8', newline='') as f:
        rows = list(csv.reader(f, delimiter='\t', quoting=csv.QUOTE_NONE))
    sentence = next(r[5] for r in rows[1:] if len(words(r[5])) >= 2 * N)
    assert (
        len(shared({'copy': f'Our words. {sentence}', 'own': 'nothing of theirs'}, [tsv]))
        == len(words(sentence)) - N + 1
    )
