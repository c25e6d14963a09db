"Corpora of any size, made by a seed: for what must not grow with them."

from itertools import islice
from pathlib import Path
import numpy as np

_HEADER = ('QuestionID', 'Question', 'DocumentID', 'DocumentTitle', 'SentenceID', 'Sentence', 'Label')
_SPLITS = dict(train=1.0, dev=0.01, test=0.01)  # rows, as shares of those of train
_CANDIDATES = 10  # of a question, as in WikiQA
_AT_ONCE = 20_000  # rows


def _words() -> np.ndarray:
    "A thousand words, most of them a token or two."
    syllables = ['ra', 'ne', 'to', 'li', 'mu', 'sa', 'ko', 'de', 'vi', 'po']
    return np.array([a + b + c for a in syllables for b in syllables for c in syllables])


def _lines(rows: int, rng: np.random.Generator, prefix: str):
    "Rows of a table, questions after another, each with one right candidate."
    words = _words()
    for start in range(0, rows, _AT_ONCE):
        n = min(_AT_ONCE, rows - start)
        picked = words[rng.integers(0, len(words), (n, 32))]
        sizes = rng.integers(8, 26, n).tolist()
        for i in range(n):
            question, candidate = divmod(start + i, _CANDIDATES)
            of = f'{prefix}{question}'
            if not candidate:
                asked = ' '.join(picked[i, 26:])
            yield '\t'.join(
                (
                    of,
                    f'what {asked} {question}?',
                    f'D{of}',
                    f'page {of}',
                    f'D{of}-{candidate}',
                    ' '.join(picked[i, : sizes[i]]),
                    str(int(candidate == question % _CANDIDATES)),
                )
            )


def synthetic_pairs(
    folder: Path,
    rows: int,  # of train; dev and test have a hundredth each, and 20 at least
    seed: int = 0,
) -> Path:  # the folder: train.tsv, dev.tsv, test.tsv in the shape of WikiQA
    "Questions with ten candidates each, of random words, about 40 tokens a pair."
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for number, (split, share) in enumerate(_SPLITS.items()):
        lines = _lines(max(20, round(share * rows)), np.random.default_rng([seed, number]), split[0].upper())
        with open(folder / f'{split}.tsv', 'w', encoding='utf-8') as f:
            f.write('\t'.join(_HEADER) + '\n')
            while some := list(islice(lines, _AT_ONCE)):
                f.write('\n'.join(some) + '\n')
    return folder


def read_large(folder: Path) -> tuple[str, int]:
    "What each of several processes does: the sum of a corpus, and how often its files were read for it."
    from kdnotes.tasks import sources

    sources.LARGE = 1
    read = sources.load_by_rules
    times = []

    def counted(*given):
        times.append(1)
        return read(*given)

    sources.load_by_rules = counted
    return sources.load_corpus('answer_selection', str(folder)).sha256, len(times)
