"""Names, places, dates and numbers in passages of SQuAD 1.1, as CoNLL files that token classification reads.

    python tools/squad_entities.py FOLDER [--train 2000] [--dev 400] [--test 800]
    kdnotes study --task token_classification --corpus FOLDER

What an answer is, its question says: `who` a PER, `where` or `what city` a LOC, `when` or `what year` a
DATE, `how many` or `how much` a NUM. An answer counts if it looks like one: names are one to four words in
capitals, dates and numbers hold a digit. Every place of its passage where the same words stand has the same
tag; the longest one wins. A sentence is kept if it has an entity. Names that nobody asked for have no tag,
so that no score can be perfect. A document is an article, and is in one split only.
"""

import argparse
import re
from collections import defaultdict
from pathlib import Path
from random import Random
from kdnotes.tasks.sources import SPLITS, load_corpus
from kdnotes.tasks.tagged_texts import split_words

KINDS = {
    'PER': r'\b(who|whom|whose)\b',
    'LOC': r'\bwhere\b|\b(what|which) (city|country|state|county|town|river|island|continent|province)\b',
    'DATE': r'\bwhen\b|\b(what|which) (year|month|day|date|century|decade)\b',
    'NUM': r'\bhow (many|much|long|tall|far|large|big)\b',
}
NAME = re.compile(r"[A-Z][\w.'-]*(?: (?:of |the |de |von |van )?[A-Z][\w.'-]*){0,3}")


def kind_of(question: str, answer: str) -> str:  # '': none
    "What kind of entity an answer is."
    kind = next((kind for kind, asked in KINDS.items() if re.search(asked, question.lower())), '')
    if kind in ('DATE', 'NUM'):
        return kind if re.search(r'\d', answer) and len(answer.split()) <= 5 else ''
    return kind if NAME.fullmatch(answer) else ''


def passages(rows) -> dict[str, tuple[str, dict[str, str]]]:  # context -> article; answer -> kind
    "The entities that questions about each passage name."
    known: dict[str, tuple[str, dict[str, str]]] = {}
    for row in rows:
        _, entities = known.setdefault(row['context'], (row['cluster'], {}))
        for begin, end in row['answers'] or ():
            answer = row['context'][begin:end]
            if kind := kind_of(row['question'], answer):
                entities.setdefault(answer, kind)
    return known


def tagged(text: str, entities: dict[str, str]) -> list[tuple[str, str]]:  # word and tag
    "A sentence with the tags of the entities that stand in it as whole words."
    words, places = split_words(text)
    tags = ['O'] * len(words)
    for answer, kind in sorted(entities.items(), key=lambda entity: -len(entity[0])):
        for match in re.finditer(rf'(?<!\w){re.escape(answer)}(?!\w)', text):
            inside = [
                i for i, (begin, end) in enumerate(places) if begin < match.end() and match.start() < end
            ]
            if all(tags[i] == 'O' for i in inside):
                for i in inside:
                    tags[i] = f'{"I" if i != inside[0] else "B"}-{kind}'
    return list(zip(words, tags))


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    given.add_argument('folder', type=Path)
    for split, n in dict(train=2000, dev=400, test=800).items():
        given.add_argument(f'--{split}', type=int, default=n, help='sentences, at most')
    given = given.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus('extractive_qa', 'squad1')
    for split in SPLITS:
        of_article = defaultdict(list)
        for context, (article, entities) in passages(corpus.splits[split]).items():
            for sentence in re.split(r'(?<=[.!?])\s+(?=[A-Z"])', context):
                words = tagged(sentence, entities)
                if any(tag != 'O' for _, tag in words):
                    of_article[article].append(words)
        articles = list(of_article.values())
        kept = Random(0).sample(
            [(a, s) for a, of in enumerate(articles) for s in range(len(of))],
            min(getattr(given, split), sum(map(len, articles))),
        )
        lines = []
        for a in range(len(articles)):
            chosen = sorted(s for article, s in kept if article == a)
            lines += ['-DOCSTART- O', ''] * bool(chosen)
            for s in chosen:
                lines += [f'{word} {tag}' for word, tag in articles[a][s]] + ['']
        (given.folder / f'{split}.conll').write_text('\n'.join(lines) + '\n', encoding='utf-8')
        print(f'{split}: {len(kept)} sentences of {len({a for a, _ in kept})} articles')


if __name__ == '__main__':
    main()
