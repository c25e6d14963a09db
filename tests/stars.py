"""Reviews with one to five stars: classes in an order, scored by how many stars a prediction is off."""

import random
import numpy as np
from kdnotes.tasks.base import Primary, Task, TaskInfo, setting
from kdnotes.tasks.schema import Column, NoLabel, Schema
from kdnotes.tasks.sources import Corpora

STARS = ('1', '2', '3', '4', '5')
WORDS = ('awful', 'weak', 'fair', 'good', 'superb')
SCHEMA = Schema(
    columns=dict(
        id=Column('id', 'id', optional=True),
        text=Column('review'),
        label=Column('stars', 'class'),
    ),
    content=('text', 'label'),
    unusable=lambda split, rows: '' if set(rows['label']) <= {*STARS, ''} else 'stars must be 1 to 5',
    no_label=NoLabel(),
    scored=True,
)


def example_reviews():
    "A small corpus that comes with the task: corpus=embedded."
    rng = random.Random(0)

    def row(i):
        star = rng.randrange(5)
        words = rng.choices(WORDS[max(0, star - 1) : star + 2], k=2) + [WORDS[star]] * 2
        return dict(id=f'r{i}', text=f'review {i}: ' + ' '.join(rng.sample(words, 4)), label=STARS[star])

    return {split: [row(i) for i in range(n)] for split, n in dict(train=320, dev=80, test=120).items()}


class Stars(Task):
    name = 'stars'
    primary = Primary('test', 'stars_off', higher_is_better=False)

    def take(self, corpus):
        self.take_rows(corpus)
        self.take_classes(STARS)
        self.add_unlabelled(corpus)

    def measure(self, scores, labels):
        p = np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True))
        expected = p @ np.arange(5)
        values = dict(
            stars_off=np.abs(expected - labels), accuracy=(scores.argmax(1) == labels).astype(float)
        )
        return {name: float(v.mean()) for name, v in values.items()}, values


TASK = TaskInfo(
    name='stars',
    make=Stars.from_corpus,
    corpora=Corpora(SCHEMA, example_reviews),
    defaults={('*', '*'): setting(4, 3e-4)},
    metric_names={'stars_off': 'stars off'},
)
