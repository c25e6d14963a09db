"""Texts as long as their model reads, what the plan says of those that are longer, and CSV files whose
columns are separated by other characters than commas.
"""

import gzip
import re
import subprocess
import pandas as pd
import pytest
import transformers as hf
import kdnotes as kd
from architectures import SIZE, TOKENS, write_teacher
from kdnotes.core.parse import make_config
from kdnotes.core.tables import CorpusError, read_table
from kdnotes.distill.weights import ModelError
from kdnotes.experiment.plan import plan
from kdnotes.tasks.sources import load_corpus

TASK = 'text_classification'


def write_letters(folder, lengths, end='csv', separator=','):
    "A corpus of two classes; its training texts have so many letters, which are tokens of the model below."
    folder.mkdir()
    for split, n_letters in dict(train=lengths, dev=[3, 4], test=[4, 5]).items():
        texts = [' '.join('ab'[i % 2] * n) for i, n in enumerate(n_letters)]
        rows = pd.DataFrame(dict(text=texts, label=['n', 'p'] * (len(texts) // 2)))
        rows.to_csv(folder / f'{split}.{end}', index=False, sep=separator)
    return str(folder)


def modernbert(folder, positions=8192):
    sizes = SIZE | dict(num_hidden_layers=2, local_attention=8, max_position_embeddings=positions)
    return str(write_teacher(folder, hf.ModernBertConfig(**sizes, **TOKENS, cls_token_id=2, sep_token_id=3)))


@pytest.mark.slow
@pytest.mark.parametrize('max_length', [2048, pytest.param(8192, marks=pytest.mark.exhaustive)])
def test_a_model_is_trained_on_texts_as_long_as_it_reads(max_length, home, rank_here):
    data = kd.load_data(write_letters(home / 'long', [max_length - 2, max_length - 1, 5, 6]), task=TASK)
    given = dict(max_length=max_length, batch_size=4, epochs=1, ranks=1, say=lambda text: None)
    run = kd.finetune(data, modernbert(home / 'model'), **given)
    counts = run.record['tokenisation']
    assert counts['cut']['train'] == 1 and counts['tokens']['train'] == 2 * (max_length - 2) + 5 + 6
    [step] = run.folder.rows('step')
    assert step['loss'] is not None and step['tokens'] == counts['tokens']['train'] + 2 * 4


def test_a_longer_text_than_the_model_reads_is_refused_in_the_plan(home):
    corpus = write_letters(home / 'corpus', [3, 4])
    given = dict(mode='baseline', task=TASK, corpus=corpus, teacher=modernbert(home / 'model'))
    with pytest.raises(ModelError, match='at most 8192 tokens, and max_length=8193; use max_length=8192'):
        plan(make_config(**given, max_length=8193))


@pytest.mark.parametrize('check', [False, True])
def test_the_plan_says_how_many_rows_are_truncated(check, home):
    model = modernbert(home / 'model')
    # two special tokens; of the last one only parts are read
    lengths = [30, 31, 10, 40, 5, 50_000]
    note = '3 of 6 rows of train are longer than max_length=32 and are truncated'
    given = dict(mode='baseline', task=TASK, teacher=model, max_length=32)
    found = plan(make_config(corpus=write_letters(home / 'few', lengths), **given), check=check)
    assert list(map(str, found.texts)) == [note]
    assert note in found.explain()
    many = write_letters(home / 'many', [40] * 300 + [20] * 700)
    [found] = plan(make_config(corpus=many, **given), check=check).texts
    assert str(found).startswith('in a sample, 150 of 500 rows of train are longer')
    short = write_letters(home / 'short', [30, 30])
    assert plan(make_config(corpus=short, **given), check=check).texts == ()


@pytest.mark.parametrize('separator', [';', '\t', '|'])
def test_a_csv_file_may_have_another_separator(separator, tmp_path):
    frame = pd.DataFrame(dict(text=[f'salt{separator} "white", dry', 'a, b'], label=['n', 'p']))
    corpora = []
    for name, sep in (('commas', ','), ('others', separator)):
        (tmp_path / name).mkdir()
        for split in ('train', 'dev', 'test'):
            frame.assign(text=frame['text'] + split).to_csv(
                tmp_path / name / f'{split}.csv', index=False, sep=sep
            )
        corpora.append(load_corpus(TASK, str(tmp_path / name)))
    rows = [{split: [*map(dict, rows)] for split, rows in corpus.splits.items()} for corpus in corpora]
    assert rows[0] == rows[1]
    (tmp_path / 'others/dev.csv').write_text(f'text{separator}label\na{separator}b{separator}c\n')
    with pytest.raises(CorpusError, match='3 fields where the header has 2; separate columns by'):
        load_corpus(TASK, str(tmp_path / 'others'))


@pytest.mark.parametrize('end', ['csv', 'jsonl.gz'])
def test_a_file_in_another_encoding_is_refused_with_the_command_that_converts_it(tmp_path, end):
    content = '{"text": "café"}\n' if 'jsonl' in end else 'text,label\ncafé,1\n'
    encoded = content.encode('cp1252')
    path = tmp_path / f'my films.{end}'
    path.write_bytes(gzip.compress(encoded) if 'gz' in end else encoded)
    with pytest.raises(CorpusError, match='byte 0xe9 is not UTF-8; save the file as UTF-8, or convert') as e:
        list(read_table(path, {'text'}))
    [command] = re.findall('`(.+)`', str(e.value))
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    _, part = read_table(tmp_path / f'utf8-my films.{end}', {'text'})
    assert part.cells == dict(text=['café'])
