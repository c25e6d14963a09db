"""Entities in texts: seqeval's numbers, files in many shapes and what is refused in them, the places of words
in tokens, losses by hand, and a model in use.
"""

import json
from types import SimpleNamespace
import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import transformers
from seqeval import metrics as seqeval
from seqeval.metrics.sequence_labeling import get_entities
from small_runs import small_model, write_encoder
from tokenizers import processors
import kdnotes as kd
from kdnotes.core.columns import Columns
from kdnotes.core.config import KdnotesError
from kdnotes.core.machine import Machine
from kdnotes.core.parse import make_config
from kdnotes.core.resolve import resolve
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM
from kdnotes.experiment.evaluate import evaluate
from kdnotes.experiment.plan import plan
from kdnotes.experiment.predict import predict
from kdnotes.experiment.study import run_study
from kdnotes.results.runs import read_csv
from kdnotes.results.store import predictions
from kdnotes.tasks.batching import Ragged
from kdnotes.tasks.entity_metrics import TaggedSet, entity_metrics, entity_texts, ratio_units
from kdnotes.tasks.schema import Corpus
from kdnotes.tasks.sources import SPLITS, hub_rows, load_corpus
from kdnotes.tasks.tagged_texts import SCHEMA, encode_words, iob2, split_words
from kdnotes.tasks.token_classification import TASK as INFO
from kdnotes.tasks.token_classification import TokenClassification
from test_tokenisation import of_bytes

TASK = 'token_classification'
NAMES = ['O', 'B-LOC', 'I-LOC', 'B-PER', 'I-PER', 'B-ORG', 'I-ORG']


# ---- metrics ----


def tagged_texts(seed: int, broken: bool) -> tuple[list[list[str]], TaggedSet]:
    "Tags of texts of 0 to 12 words; sound ones have no I that begins an entity."
    rng = np.random.default_rng(seed)
    texts = [[NAMES[i] for i in rng.integers(0, len(NAMES), rng.integers(0, 12))] for _ in range(60)]
    texts = texts if broken else [iob2(text) for text in texts]
    ragged = Ragged.from_rows([[NAMES.index(tag) for tag in text] for text in texts])
    return texts, TaggedSet(ragged.values, ragged.offsets, NAMES)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('seed', range(4))
def test_entities_are_scored_as_seqeval_scores_them(seed):
    right, tagged = tagged_texts(seed, broken=seed == 3)
    rng = np.random.default_rng(seed)
    wrong = rng.random(len(tagged.tags)) < 0.5  # where tags are drawn anew, broken ones among them
    predicted = np.where(wrong, rng.integers(0, len(NAMES), len(tagged.tags)), tagged.tags)
    ragged = Ragged(predicted, tagged.offsets)
    texts = [[NAMES[i] for i in ragged[k]] for k in range(len(ragged))]
    found, values = entity_metrics(tagged, predicted)
    scores = dict(
        f1='f1_score', precision='precision_score', recall='recall_score', accuracy='accuracy_score'
    )
    for name, function in scores.items():
        expected = getattr(seqeval, function)(right, texts)
        assert found[name] == pytest.approx(expected, abs=1e-12)
        assert values[name].mean() == pytest.approx(expected, abs=1e-12)
    report = seqeval.classification_report(right, texts, output_dict=True)
    for kind in ('LOC', 'PER', 'ORG'):
        assert found[f'f1_{kind}'] == pytest.approx(report[kind]['f1-score'], abs=1e-12)
    shown = [
        ', '.join(f'{begin}:{end + 1} {kind}' for kind, begin, end in get_entities(text)) or '-'
        for text in texts
    ]
    assert entity_texts(tagged, predicted) == shown


@pytest.mark.parametrize('prefixes', ['BIO', 'BIESO', 'IO'])
def test_other_notations_have_the_entities_that_seqeval_finds(prefixes):
    rng = np.random.default_rng(len(prefixes))
    for _ in range(200):
        drawn = [(rng.choice(list(prefixes)), rng.choice(['LOC', 'PER'])) for _ in range(rng.integers(1, 9))]
        tags = ['O' if prefix == 'O' else f'{prefix}-{kind}' for prefix, kind in drawn]
        assert get_entities(iob2(tags)) == get_entities(tags), tags
        assert iob2(iob2(tags)) == iob2(tags)


def test_nothing_to_find_is_0_and_not_an_error():
    tagged = TaggedSet(np.zeros(4, dtype=int), np.array([0, 1, 4]), NAMES)
    found, values = entity_metrics(tagged, tagged.tags)
    assert found == dict(f1=0, precision=0, recall=0, accuracy=1) and not values['f1'].any()
    found, _ = entity_metrics(tagged, np.array([0, 1, 2, 0]))
    assert (found['f1'], found['f1_LOC'], found['accuracy']) == (0, 0, 0.5)


def test_the_spread_of_units_is_that_of_a_bootstrap_of_f1():
    _, tagged = tagged_texts(0, broken=False)
    rng = np.random.default_rng(1)
    predicted = np.where(rng.random(len(tagged.tags)) < 0.3, 0, tagged.tags)
    values = entity_metrics(tagged, predicted)[1]['f1']
    right, guesses = tagged.entities(tagged.tags), tagged.entities(predicted)
    hits = tagged.by_text(guesses, guesses.same(right))
    both = tagged.by_text(guesses) + tagged.by_text(right)
    drawn = rng.integers(0, len(both), (4000, len(both)))
    whole = np.std(2 * hits[drawn].sum(1) / both[drawn].sum(1))
    assert np.std(values[drawn].mean(1)) == pytest.approx(whole, rel=0.06)
    assert not ratio_units(np.zeros(3), np.zeros(3)).any()


# ---- files ----

CONLL = '-DOCSTART- -X- O\n\nAda NNP I-PER\nleft VBD O\n\nAshford\xa0Hill NNP I-LOC\n'
ROWS = [
    dict(tokens=['Ada', 'left'], tags=['B-PER', 'O']),
    dict(tokens=['Ashford\xa0Hill'], tags=['B-LOC']),
]


def written(folder, text: str, name: str) -> str:
    "A corpus whose files hold the same."
    folder.mkdir(exist_ok=True)
    for split in SPLITS:
        (folder / name.replace('*', split)).write_text(text, encoding='utf-8')
    return str(folder)


def read(folder) -> list[dict]:
    return list(load_corpus(TASK, str(folder)).splits['dev'])


@pytest.mark.parametrize('name', ['*.conll', '*.txt', '*.bio', 'eng.*'])
def test_files_of_conll_are_read(tmp_path, name):
    folder = tmp_path / 'corpus'
    written(folder, CONLL, name)
    if name == 'eng.*':
        (folder / 'eng.dev').rename(folder / 'eng.testa')
        (folder / 'eng.test').rename(folder / 'eng.testb')
    rows = read(folder)
    assert [{key: row[key] for key in ('tokens', 'tags')} for row in rows] == ROWS
    assert [row['cluster'] for row in rows] == ['D1', 'D1'] and rows[0]['text'] == 'Ada left'
    assert len({row['id'] for row in rows}) == 2


def test_documents_may_be_told_apart_from_the_second_on(tmp_path):
    text = 'Ada B-PER\n\n-DOCSTART- O\n\nRome B-LOC\n\nBob B-PER\n'
    assert [row['cluster'] for row in read(written(tmp_path / 'corpus', text, '*.conll'))] == [
        'D0',
        'D1',
        'D1',
    ]


def test_a_text_with_tokens_and_spans_has_the_words_of_the_text(tmp_path):
    row = dict(text='Ada left.', tokens=['Ada', 'left.'], spans=[dict(start=0, end=3, label='PER')])
    [found] = read(written(tmp_path / 'corpus', json.dumps(row) + '\n', '*.jsonl'))
    assert found['tokens'] == ['Ada', 'left', '.'] and found['tags'] == ['B-PER', 'O', 'O']


@pytest.mark.parametrize('names', [('NOUN', 'VERB'), ('O', 'PER')])
def test_outputs_that_are_no_tags_are_refused(names):
    task = TokenClassification(load_corpus(TASK, 'embedded'), 32)
    with pytest.raises(KdnotesError, match=f'are called {names[0]!r}, {names[1]!r}, and entities need O'):
        task.take_classes(names)


def test_all_shapes_are_one_corpus(tmp_path):
    "Tabs, a list as JSON in a table, places, Windows lines, IOBES: equal content has an equal hash."
    places = [dict(text='Ada left', spans=[dict(start=0, end=3, label='PER')]), dict(text='Bo .', spans=[])]
    tags = [dict(tokens=['Ada', 'left'], tags=['S-PER', 'O']), dict(tokens=['Bo', '.'], tags=['O', 'O'])]
    table = pd.DataFrame({key: [json.dumps(row[key]) for row in tags] for key in ('tokens', 'tags')})
    shapes = {
        'a.jsonl': ''.join(json.dumps(row) + '\n' for row in places),
        'b.jsonl': ''.join(json.dumps(row) + '\n' for row in tags),
        'c.csv': table.to_csv(index=False),
        'd.conll': 'Ada\tI-PER\r\nleft\tO\r\n \t\r\nBo\tO\r\n.\tO\r\n',
    }
    found = {}
    for name, text in shapes.items():
        folder, _, end = name.partition('.')
        corpus = load_corpus(TASK, written(tmp_path / folder, text, f'*.{end}'))
        found[name] = corpus.sha256
    data = kd.load_data(dict.fromkeys(SPLITS, pd.DataFrame(tags)), TASK, say=lambda text: None)
    found['kd'] = load_corpus(TASK, data.corpus).sha256
    assert len(set(found.values())) == 1, found


def test_the_shape_of_the_hub_has_numbers_with_names():
    datasets = pytest.importorskip('datasets')
    names = datasets.ClassLabel(names=['O', 'B-PER', 'I-PER'])
    for feature in (datasets.Sequence(names), [names]):
        columns = datasets.Features(
            id=datasets.Value('string'), tokens=datasets.Sequence(datasets.Value('string')), ner_tags=feature
        )
        given = dict(id=['0'], tokens=[['Ada', 'May']], ner_tags=[[1, 2]])
        [row] = hub_rows(datasets.Dataset.from_dict(given, features=columns), 'train', 'hub', SCHEMA)
        assert (row['tags'], row['text']) == (['B-PER', 'I-PER'], 'Ada May')


def test_parquet_of_the_hub_keeps_the_names(tmp_path):
    datasets = pytest.importorskip('datasets')
    names = datasets.Sequence(datasets.ClassLabel(names=['O', 'B-PER', 'I-PER']))
    features = datasets.Features(tokens=datasets.Sequence(datasets.Value('string')), ner_tags=names)
    table = datasets.Dataset.from_dict(dict(tokens=[['Ada', 'left']], ner_tags=[[1, 0]]), features=features)
    for split in SPLITS:
        table.to_parquet(tmp_path / f'{split}.parquet')
    [row] = load_corpus(TASK, str(tmp_path), 'tags=ner_tags').splits['dev']
    assert row['tags'] == ['B-PER', 'O']


GOOD = dict(tokens=['Ada', 'left'], tags=['B-PER', 'O'])
TEXT = dict(text='Ada May left.')
# the second row of a file, or a whole one; what is said
REFUSED = {
    'a tag of no kind': (
        GOOD | dict(tags=['PER', 'O']),
        "line 2: tag 'PER' is neither O nor a kind behind B-",
    ),
    'an empty kind': (GOOD | dict(tags=['B-', 'O']), "tag 'B-' is neither O"),
    'a number': (GOOD | dict(tags=[1, 0]), "tag '1' is neither O"),
    'too few tags': (GOOD | dict(tags=['O']), 'line 2: tags is 1 tags'),
    'tags that are no list': (GOOD | dict(tags='O O'), "tags is no list ('O O')"),
    'no words': (GOOD | dict(tokens=[], tags=[]), 'line 2: tokens is []; give a list of words, one at least'),
    'blank words': (GOOD | dict(tokens=[' ', '']), 'give a list of words, one at least'),
    'an empty word': (GOOD | dict(tokens=['Ada', '']), "tokens holds '', which is no word"),
    'no words at all': (GOOD | dict(tokens=None), 'tokens is None'),
    'a kind of dev alone': (
        GOOD | dict(tags=['B-GPE', 'O']),
        "tag 'B-GPE' is of a kind that the training split",
    ),
    'a span within a word': (
        TEXT | dict(spans=[[0, 2, 'PER']]),
        "line 2: the span 0 to 2 ('Ad', PER) does not",
    ),
    'a span with a blank': (
        TEXT | dict(spans=[[0, 4, 'PER']]),
        "the span 0 to 4 ('Ada ', PER) does not begin",
    ),
    'a span behind the end': (TEXT | dict(spans=[[9, 99, 'PER']]), 'the span 9 to 99'),
    'an empty span': (TEXT | dict(spans=[[0, 0, 'PER']]), 'the span 0 to 0'),
    'spans that overlap': (
        TEXT | dict(spans=[[0, 7, 'PER'], dict(start=4, end=7, label='LOC')]),
        "the span 4 to 7 ('May', LOC) overlaps another one",
    ),
    'half a span': (TEXT | dict(spans=[dict(start=0, label='PER')]), 'is no start, end and label'),
    'a span without a label': (TEXT | dict(spans=[[0, 3, None]]), "tag 'B-' is neither O"),
    'a kind with a comma': (GOOD | dict(tags=['B-A, B', 'O']), "tag 'B-A, B' is neither O"),
    'no spans': (TEXT | dict(spans=None), 'line 2: spans is None'),
    'a text without words': (dict(text=' ', spans=[]), 'line 2: text is empty'),
    'columns': ('Ada NNP B-PER\nleft O\n', 'dev.conll, line 2: 2 columns where the first word has 3'),
    'no sentence': ('\n\n-DOCSTART-\n', 'dev.conll is empty'),
    'no tags': ('Ada\nleft\n', "there is no column 'tags' among 'tokens'"),
    'no entity': ('Ada O\nleft O\n', 'dev.conll: every tag is O, so there is no entity'),
    'a tag of conll': ('Ada B-PER\n\nleft X-PER\n', "dev.conll, line 3: tag 'X-PER' is neither O"),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_cannot_be_is_refused_with_its_row(case, tmp_path):
    wrong, words = REFUSED[case]
    if isinstance(wrong, str):
        folder, bad = written(tmp_path / 'corpus', 'Ada B-PER\n', '*.conll'), wrong
        path = tmp_path / 'corpus' / 'dev.conll'
    else:
        first = TEXT | dict(spans=[[0, 7, 'PER']]) if 'spans' in wrong else GOOD
        folder = written(tmp_path / 'corpus', json.dumps(first) + '\n', '*.jsonl')
        path = tmp_path / 'corpus' / 'dev.jsonl'
        bad = json.dumps(first) + '\n' + json.dumps(wrong) + '\n'
    path.write_text(bad, encoding='utf-8')
    with pytest.raises(KdnotesError) as e:
        plan(make_config(task=TASK, mode='baseline', corpus=folder), Machine('cpu', 2))
    assert words in str(e.value) and '\n' not in str(e.value)


def test_a_folder_of_nothing_says_what_is_read(tmp_path):
    with pytest.raises(
        KdnotesError, match='train, dev and test as .*conll or train, dev and test as .txt or'
    ):
        load_corpus(TASK, str(tmp_path))


def test_rows_without_tags_are_read_and_their_tags_are_not_made_up(tmp_path):
    written(tmp_path, CONLL, '*.conll')
    (tmp_path / 'unlabelled.conll').write_text('Bo\nslept\n')
    [row] = load_corpus(TASK, str(tmp_path)).unlabelled
    assert (row['tokens'], row['tags'], row['text']) == (['Bo', 'slept'], None, 'Bo slept')


# ---- words in tokens ----


def rows_of(texts: list[list[str]], tags: list[list[str]] | None = None) -> list[dict]:
    tags = tags or [['B-PER'] + ['O'] * (len(words) - 1) for words in texts]
    return [
        dict(id=f'S{i}', text=' '.join(words), tokens=words, tags=of, cluster=f'S{i}')
        for i, (words, of) in enumerate(zip(texts, tags))
    ]


def task_of(texts: list[list[str]], max_length: int = 32, tags=None, unlabelled=(), **given):
    rows = rows_of(texts, tags)
    splits = dict.fromkeys(SPLITS, rows)
    if unlabelled:
        splits['unlabelled'] = [row | dict(tags=None) for row in rows_of(unlabelled)]
    config = resolve(
        make_config(task=TASK, mode='full_kd', max_length=max_length, **given), Machine('cpu', 2), 'embedded'
    )
    task = TokenClassification.from_corpus(Corpus('a', 'folder', '', splits, '0' * 64), config)
    task.encode(load_tokenizer(MINILM))
    return task


def with_blanks():
    "Bytes, and a blank that is counted to the piece behind it."
    pieces = [*of_bytes().get_vocab(), 'Ġa', 'ĠQ', 'ĠN']
    tokenizer = transformers.RobertaTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=[('Ġ', letter) for letter in 'aQN']
    )
    ends = (('</s>', tokenizer.sep_token_id), ('<s>', tokenizer.cls_token_id))
    tokenizer.backend_tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=False)
    return tokenizer


@pytest.mark.parametrize('make', [lambda: load_tokenizer(MINILM), of_bytes, with_blanks])
def test_the_first_piece_of_each_word_is_found(make, tmp_path):
    "Compared with what the tokenizer makes of the words one by one."
    tokenizer = make()
    rng = np.random.default_rng(0)
    words = ['Quillfeather', "O'Neil", '東京', 'a', '...', 'New York', 'naïve', '\u200b', 'x' * 9]
    texts = [['Ada', *(words[i] for i in rng.integers(0, len(words), rng.integers(1, 9)))] for _ in range(40)]
    rows = Columns.from_rows(rows_of(texts))
    for cache in (None, tmp_path, tmp_path):  # made, kept, read
        found = encode_words(tokenizer, rows, 24, cache)
        for text, first in zip(texts, (found[i] for i in range(len(found)))):
            ids = tokenizer(' '.join(text), truncation=True, max_length=24)['input_ids']
            assert len(first) == len(ids) and first[0] == first[-1] == -1
            known = first[first >= 0]
            assert (np.diff(known) > 0).all()
            offsets = tokenizer(' '.join(text), truncation=True, max_length=24, return_offsets_mapping=True)
            for token, word in enumerate(first):
                begin, end = offsets['offset_mapping'][token]
                if word >= 0:
                    assert ' '.join(text)[begin:end].strip()[0] in text[word]
            whole = len(tokenizer(' '.join(text))['input_ids']) <= 24
            silent = {i for i, word in enumerate(text) if word == '\u200b'}
            assert set(range(len(text))) - set(known.tolist()) <= silent or not whole


def test_labels_stand_at_first_pieces_and_nowhere_else():
    task = task_of([['Ada', 'Quillfeather', 'left']], tags=[['B-PER', 'I-PER', 'O']])
    [labels] = task.batch('dev', np.array([0])).labels.tolist()
    tokens = load_tokenizer(MINILM).convert_ids_to_tokens(
        task.batch('dev', np.array([0])).inputs['input_ids'][0]
    )
    assert task.head_labels == ('O', 'B-PER', 'I-PER')
    assert [(token, label) for token, label in zip(tokens, labels) if label != -100] == [
        ('ada', 1),
        ('qui', 2),
        ('left', 0),
    ]


def test_words_that_were_cut_off_are_outside_and_not_in_a_loss():
    texts = [['Ada', *['walked'] * 20, 'Bo'], ['Ada', 'left']]
    tags = [['B-PER', *['O'] * 20, 'B-PER'], ['B-PER', 'O']]
    task = task_of(texts, 16, tags)
    assert task.loss_counts('train', np.array([0, 1])) == dict(hard=14 + 2, soft=14 + 2)
    assert task.token_counts()['dev'].cut == 1
    batch = task.batch('test', np.array([0, 1]))
    perfect = F.one_hot(batch.labels.clamp(min=0), 3).float() * 50
    found = task.evaluate({'test': task.scores(SimpleNamespace(logits=perfect), batch).numpy()})
    assert found.metrics['test']['precision'] == 1 and found.metrics['test']['recall'] == 2 / 3
    assert found.metrics['test']['nll'] == pytest.approx(0, abs=1e-6)
    assert found.predictions['item'].tolist() == ['0:1 PER', '0:1 PER']
    assert found.predictions['label'].tolist() == ['0:1 PER, 21:22 PER', '0:1 PER']


@pytest.mark.parametrize('more', [{}, dict(top_k=2), dict(min_probability=0.4)])
def test_losses_are_those_of_the_words_alone(more):
    texts = [['Ada', 'Quillfeather', 'left'], ['It', 'rained']]
    task = task_of(texts, temperature=3, unlabelled=[['Bo', 'Quillfeather']], **more)
    batch = task.batch('train', np.array([2, 0, 1]))
    torch.manual_seed(0)
    student = torch.randn(*batch.labels.shape, 3, requires_grad=True)
    teacher = torch.randn(*batch.labels.shape, 3)
    signal = task.signal(SimpleNamespace(logits=teacher), batch)
    assert signal['logits'].shape == (batch.tokens, 3)
    terms = task.loss_terms(SimpleNamespace(logits=student), batch, signal)
    words = batch.labels != -100
    known = batch.labels >= 0
    assert {name: n for name, (_, n) in terms.items()} == dict(hard=5, soft=7)
    assert (int(known.sum()), int(words.sum())) == (5, 7)
    expected = F.cross_entropy(student[known], batch.labels[known], reduction='sum')
    torch.testing.assert_close(terms['hard'][0], expected)
    torch.testing.assert_close(terms['soft'][0], task.soft_targets(student[words], teacher[words]))
    [gradient] = torch.autograd.grad(terms['soft'][0] + terms['hard'][0], student)
    assert not gradient[~words].any() and gradient[words].any()


# ---- a model in use ----


def test_entities_are_those_of_the_evaluation_and_of_transformers(small_run):
    run_id = small_run(TASK)
    rows = {row['id']: row for row in load_corpus(TASK, 'embedded').splits['dev']}
    stored = predictions('small', [run_id])
    some = stored[stored['split'] == 'dev'].iloc[:12]
    find = transformers.pipeline(
        'token-classification', model=str(kd.load_run(run_id).model), aggregation_strategy='first'
    )
    texts = [rows[unit]['text'] for unit in some['unit']]
    n = 0
    for text, item, answer in zip(texts, some['item'], predict(run_id, text=texts)):
        entities = answer.values['entities']
        places = split_words(text)[1]
        begins, ends = ([place[k] for place in places] for k in (0, 1))
        shown = [f'{begins.index(e["start"])}:{ends.index(e["end"]) + 1} {e["label"]}' for e in entities]
        assert (', '.join(shown) or '-') == item
        assert all(text[e['start'] : e['end']] == e['text'] for e in entities)
        theirs = find(text)
        n += len(theirs)
        expected = [
            (e['entity_group'], e['start'], e['end'], pytest.approx(float(e['score']), abs=1e-5))
            for e in theirs
        ]
        assert [(e['label'], e['start'], e['end'], e['probability']) for e in entities] == expected
    assert n


def test_a_text_is_answered_as_it_came(small_run):
    "Characters are those of the text, whatever its blanks; a text without a word has no entity."
    run_id = small_run(TASK)
    said = [
        predict(run_id, text=text).answer.values['entities']
        for text in ('Ada  May\nleft Ashford.', 'Ada May left Ashford .')
    ]
    assert [[e['label'], ''.join(e['text'].split()), round(e['probability'], 4)] for e in said[0]] == [
        [e['label'], ''.join(e['text'].split()), round(e['probability'], 4)] for e in said[1]
    ]
    table = kd.load_run(run_id).predict(pd.DataFrame(dict(text=['Ada May left Ashford .', '\u200b'])))
    [whole, none] = table.to_dict('records')
    assert len(json.loads(whole['entities'])) == whole['n_entities'] == len(said[1])
    assert (none['entities'], none['n_entities']) == ('[]', 0) and np.isnan(none['least_probability'])


def test_a_model_of_others_is_evaluated_by_the_names_of_its_outputs(small_run, tmp_path):
    "In another order than ours, on a file; a kind that it does not have is refused."
    run_id = small_run(TASK)
    source = kd.load_run(run_id).model
    model = transformers.AutoModelForTokenClassification.from_pretrained(source)
    order = list(range(model.config.num_labels))[::-1]
    for part in (model.classifier.weight, model.classifier.bias):
        part.data = part.data[order]
    names = [model.config.id2label[i] for i in order]
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {name: i for i, name in enumerate(names)}
    model.save_pretrained(tmp_path / 'model')
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / 'model')
    rows = list(load_corpus(TASK, 'embedded').splits['test'])[:40]
    lines = [f'{word} {tag}\n' for row in rows for word, tag in [*zip(row['tokens'], row['tags']), ('', '')]]
    (tmp_path / 'new.conll').write_text(''.join(line.lstrip(' ') for line in lines))
    ours, theirs = (
        evaluate(str(name), str(tmp_path / 'new.conll'), task=TASK) for name in (run_id, tmp_path / 'model')
    )
    scores = [
        found.table.query("about == 'model'").set_index('metric')['estimate'].to_dict()
        for found in (ours, theirs)
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6) and ours.n_rows == 40
    baselines = set(ours.table.query("about == 'baseline'")['name'])
    assert baselines == set(INFO.floors.values())
    (tmp_path / 'other.conll').write_text('Ada B-GPE\n')
    with pytest.raises(KdnotesError, match="tag 'B-GPE' is none of the model"):
        evaluate(str(tmp_path / 'model'), str(tmp_path / 'other.conll'), task=TASK)


@pytest.mark.slow
def test_a_study_from_its_teacher_to_its_table(tmp_path, monkeypatch, rank_here):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    teacher = str(write_encoder(tmp_path / 'teacher'))
    given = dict(corpus='embedded', teacher=teacher, student_layers='1', max_length=48, smoke=True)
    made = run_study(1, 'baseline,full_kd', task=TASK, **given)
    assert not made.failed and 'entity F1' in made.table.read_text()
    for path in (tmp_path / 'home').glob('runs/*/*/record.json'):
        record = json.loads(path.read_text())
        assert (record['primary']['metric'], record['primary']['higher_is_better']) == ('f1', True)
        stored = read_csv(path.parent / 'predictions.csv.gz').query("split == 'test'")
        pairs = [
            [{tuple(one.split(' ')) for one in cell.split(', ') if cell != '-'} for cell in row]
            for row in zip(stored['item'], stored['label'])
        ]
        hits = sum(len(found & right) for found, right in pairs)
        both = sum(len(found) + len(right) for found, right in pairs)
        assert record['primary']['value'] == pytest.approx(2 * hits / both, abs=1e-6)
        units = read_csv(path.parent / 'units.csv.gz').query("split == 'test' and metric == 'f1'")
        assert units['value'].mean() == pytest.approx(record['primary']['value'], abs=1e-5)


def test_a_student_of_another_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    teacher, student = small_model(tmp_path / 'teacher'), write_encoder(tmp_path / 'student')
    config = make_config(
        task=TASK,
        mode='full_kd',
        corpus='embedded',
        teacher=str(teacher),
        student=str(student),
        student_init='hub',
        max_length=48,
    )
    with pytest.raises(
        KdnotesError, match='another vocabulary.*task=token_classification would compare them'
    ):
        plan(config, Machine('cpu', 2))


def test_texts_that_are_cut_are_counted_in_the_plan(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    config = make_config(task=TASK, mode='baseline', corpus='embedded', max_length=8)
    assert any(
        '8 tokens' in str(note) or 'max_length=8' in str(note) for note in plan(config, check=False).texts
    )


def test_the_embedded_stories_need_more_than_a_list_of_names():
    "No text and no story is in two splits; many names are those of a person, a town and a firm."
    splits = {split: list(rows) for split, rows in load_corpus(TASK, 'embedded').splits.items()}
    assert {split: len(rows) for split, rows in splits.items()} == dict(train=600, dev=150, test=300)
    texts = [row['text'] for rows in splits.values() for row in rows]
    assert len(set(texts)) == len(texts)
    stories = [{row['cluster'] for row in rows} for rows in splits.values()]
    assert len(set.union(*stories)) == sum(map(len, stories)) and len(stories[2]) >= 80
    kinds: dict[str, set[str]] = {}
    for row in splits['train']:
        assert iob2(row['tags']) == row['tags'] and split_words(row['text'])[0] == row['tokens']
        for word, tag in zip(row['tokens'], row['tags']):
            kinds.setdefault(word, set()).add(tag[2:])
    assert sum({'PER', 'LOC', 'ORG'} <= of_word for of_word in kinds.values()) >= 20
    names = {w for row in splits['test'] for w, tag in zip(row['tokens'], row['tags']) if tag != 'O'}
    assert len(names - kinds.keys()) > 40, 'names that training does not have'
