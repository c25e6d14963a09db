"A folder with some questions of a corpus for question answering, in SQuAD's JSON."

import argparse
import json
from pathlib import Path
import numpy as np
from kdnotes.core.parse import make_config
from kdnotes.tasks.sources import corpus_of


def sample(rows, n: int, seed: int) -> list[dict]:
    "`n` rows (0: all) without their order disturbed."
    if not n:
        return list(rows)
    chosen = np.random.default_rng(seed).choice(len(rows), n, replace=False)
    return [rows[i] for i in sorted(chosen.tolist())]


def as_squad(rows: list[dict]) -> dict:
    "Rows as an official file holds them."
    articles: dict[str, dict[str, list]] = {}
    for row in rows:
        context = row['context']
        answers = [dict(text=context[a:b], answer_start=a) for a, b in row['answers']]
        question = dict(
            id=row['id'], question=row['question'], answers=answers, is_impossible=not row['answers']
        )
        articles.setdefault(row['cluster'], {}).setdefault(context, []).append(question)
    data = [
        dict(title=title, paragraphs=[dict(context=context, qas=qas) for context, qas in paragraphs.items()])
        for title, paragraphs in articles.items()
    ]
    return dict(version='2.0', data=data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('corpus', help='squad1, squad2 or a folder')
    parser.add_argument('folder', type=Path, help='what is written')
    for split in ('train', 'dev', 'test'):
        parser.add_argument(f'--{split}', type=int, default=0, help='questions; 0: all')
    parser.add_argument('--seed', type=int, default=0)
    given = parser.parse_args()
    splits = corpus_of(make_config(task='extractive_qa', corpus=given.corpus)).splits
    given.folder.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        found = as_squad(sample(rows, getattr(given, split), given.seed))
        (given.folder / f'{split}.json').write_text(json.dumps(found))


if __name__ == '__main__':
    main()
