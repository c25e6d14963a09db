"""Files of the study of reviews: IMDB's training rows in two halves, one for the teacher and one for its
students, with the same dev and test rows; and the last layer of the pretrained MiniLM as a model of its own.
"""

import argparse
import json
from pathlib import Path
from torch import nn
from transformers import AutoModel, AutoTokenizer
from kdnotes.core.arms import PROFILES
from kdnotes.core.files import sha256_text
from kdnotes.core.parse import make_config
from kdnotes.distill.weights import find_model
from kdnotes.tasks.sources import corpus_of


def half_of(id: str) -> str:  # 'a', the teacher's, or 'b', the students'
    "The half that a training row belongs to, by its id alone."
    return 'ba'[int(sha256_text('half', id)[:8], 16) % 2 == 0]


def write_halves(folder: Path) -> None:
    "Two corpora, imdb-a and imdb-b."
    splits = corpus_of(make_config(task='text_classification', corpus='imdb')).splits
    for half in 'ab':
        own = splits | {'train': [row for row in splits['train'] if half_of(row['id']) == half]}
        where = folder / f'imdb-{half}'
        where.mkdir(parents=True, exist_ok=True)
        for split in ('train', 'dev', 'test'):
            lines = [
                json.dumps({key: row[key] for key in ('id', 'text', 'label')}, ensure_ascii=False)
                for row in own[split]
            ]
            (where / f'{split}.jsonl').write_text('\n'.join(lines) + '\n', encoding='utf-8')


def write_student(folder: Path) -> None:
    "Embeddings and last layer of the pretrained model, untrained otherwise."
    pretrained = find_model(PROFILES['laptop'].teacher)
    model = AutoModel.from_pretrained(pretrained)
    model.encoder.layer = nn.ModuleList([model.encoder.layer[-1]])
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(pretrained).save_pretrained(folder)


if __name__ == '__main__':
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('folder', type=Path, nargs='?', default=Path('data'), help='what is written')
    folder = parser.parse_args().folder
    write_halves(folder)
    write_student(folder / 'models' / 'MiniLM-L1')
