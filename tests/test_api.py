"""The names that `import kdnotes` gives: data of a user, a teacher, its student, their comparison."""

import math
import subprocess
import sys
import numpy as np
import pandas as pd
import pytest
import kdnotes as kd
from kdnotes.core.config import ConfigError, KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.tasks.sources import CorpusError, corpus_of, load_corpus

NAMES = [
    'Data',
    'Run',
    'compare',
    'distil',
    'doctor',
    'finetune',
    'load_data',
    'load_results',
    'load_run',
    'study',
]


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path_factory.getbasetemp() / 'api'))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')


def questions(n=60) -> pd.DataFrame:
    rows = [
        dict(q=f'what is thing number {i}', candidate=f'thing {i} is {j} and red', right=int(j == i % 3))
        for i in range(n)
        for j in range(3)
    ]
    return pd.DataFrame(rows)


COLUMNS = dict(question='q', sentence='candidate', label='right')


def test_the_names_are_these_and_load_nothing_before_they_are_used():
    assert [name for name in dir(kd) if not name.startswith('_') and name in NAMES] == NAMES
    code = "import sys, kdnotes; print(*(m for m in ('torch', 'pandas', 'transformers') if m in sys.modules))"
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ''
    with pytest.raises(AttributeError, match="no attribute 'teach'; it has Data, Run"):
        kd.teach  # noqa: B018


def test_a_table_is_dealt_out_by_question_and_the_same_way_again():
    data = kd.load_data(questions(), columns=COLUMNS)
    corpus = load_corpus(data.task, data.corpus)
    asked = {name: {row['question'] for row in rows} for name, rows in corpus.splits.items()}
    assert {name: len(found) for name, found in asked.items()} == dict(train=48, dev=6, test=6)
    assert not asked['train'] & asked['dev'] and not (asked['train'] | asked['dev']) & asked['test']
    assert kd.load_data(questions(), columns=COLUMNS) == data
    assert kd.load_data(questions(), columns=COLUMNS, seed=1) != data


def test_rows_as_dicts_and_one_file_are_dealt_out_as_a_frame_is_and_it_is_said(tmp_path):
    of_frame = kd.load_data(questions(), columns=COLUMNS)
    said = []
    typed = ','.join(f'{key}={column}' for key, column in COLUMNS.items())
    assert kd.load_data(questions().to_dict('records'), columns=typed, say=said.append) == of_frame
    assert len(said) == 1 and 'rows with the same question stay together' in said[0]
    rows = {tuple(r[k] for k in COLUMNS) for r in load_corpus(of_frame.task, of_frame.corpus).splits['train']}
    for ending, write in (('csv.gz', 'to_csv'), ('csv', 'to_csv'), ('parquet', 'to_parquet')):
        getattr(questions(), write)(tmp_path / f'all.{ending}', index=False)
        data = kd.load_data(tmp_path / f'all.{ending}', columns=typed, say=said.append)
        found = load_corpus(data.task, data.corpus).splits
        asked = {name: {row['question'] for row in part} for name, part in found.items()}
        assert {name: len(part) for name, part in asked.items()} == dict(train=48, dev=6, test=6)
        assert not asked['train'] & (asked['dev'] | asked['test']) and 'question' in said[-1]
        assert kd.load_data(tmp_path / f'all.{ending}', columns=COLUMNS, say=said.append) == data
    assert len(rows) == 144 and len(said) == 7
    with pytest.raises(ConfigError, match='all.xlsx'):
        (tmp_path / 'all.xlsx').touch()
        kd.load_data(tmp_path / 'all.xlsx')
    with pytest.raises(CorpusError, match='all.csv.*sentence'):
        kd.load_data(tmp_path / 'all.csv', columns='question=q')


def test_a_folder_whose_columns_are_called_as_the_keys_needs_no_names(tmp_path):
    for name in ('train', 'dev', 'test'):
        (tmp_path / f'{name}.csv').write_text('question,sentence,label\nwho,she,1\nwho,nobody,0\n')
    assert kd.load_data(tmp_path) == kd.Data('answer_selection', str(tmp_path))


def test_a_split_that_is_given_is_kept():
    table = questions().assign(split=[('train', 'dev', 'test')[i % 3] for i in range(60) for _ in range(3)])
    tables = {name: part.drop(columns='split') for name, part in table.groupby('split')}
    assert kd.load_data(table, columns=COLUMNS) == kd.load_data(tables, columns=COLUMNS)
    datasets = pytest.importorskip('datasets')
    held = datasets.DatasetDict(
        {
            name.replace('dev', 'validation'): datasets.Dataset.from_pandas(part, preserve_index=False)
            for name, part in tables.items()
        }
    )
    assert kd.load_data(held, columns=COLUMNS) == kd.load_data(tables, columns=COLUMNS)


def reviews(n=12, **columns) -> pd.DataFrame:
    made = dict(body=[f'review {i}' for i in range(n)], stars=['good', 'bad'] * (n // 2))
    return pd.DataFrame(made | columns)


OF_REVIEWS = dict(text='body', label='stars')
PARTS = ['train'] * 4 + ['valid'] * 2 + ['test'] * 2 + ['unlabelled'] * 4


def rows_of(data: kd.Data) -> dict[str, list[str]]:
    config = make_config(task=data.task, corpus=data.corpus, mode='full_kd', unlabelled=data.unlabelled)
    return {split: [row['text'] for row in rows] for split, rows in corpus_of(config).splits.items()}


@pytest.mark.parametrize('kind', ['frame', 'dicts', 'csv', 'parquet', 'tables', 'datasets'])
def test_all_rows_of_a_split_column_are_read_those_without_a_label_too(kind, tmp_path):
    table = reviews(split=PARTS)
    table.loc[8:, 'stars'] = None
    source = table
    if kind == 'dicts':
        source = table.to_dict('records')
    elif kind == 'csv':
        table.to_csv(source := tmp_path / 'all.csv', index=False)
    elif kind == 'parquet':
        table.to_parquet(source := tmp_path / 'all.parquet')
    elif kind != 'frame':
        source = {name: part.drop(columns='split') for name, part in table.groupby('split')}
        source['unlabelled'] = source['unlabelled'].drop(columns='stars')
        if kind == 'datasets':
            datasets = pytest.importorskip('datasets')
            source = {
                name: datasets.Dataset.from_pandas(part, preserve_index=False)
                for name, part in source.items()
            }
    data = kd.load_data(source, 'text_classification', OF_REVIEWS)
    found = rows_of(data)
    assert {split: len(rows) for split, rows in found.items()} == dict(train=4, dev=2, test=2, unlabelled=4)
    assert [row for split in ('train', 'dev', 'test', 'unlabelled') for row in found[split]] == list(
        table['body']
    )
    assert '4 rows without a label' in data.about
    apart = kd.load_data(
        table[:8], 'text_classification', OF_REVIEWS, unlabelled=table[8:].drop(columns=['stars', 'split'])
    )
    assert rows_of(apart) == found


@pytest.mark.parametrize('name', ['Train', 'extra', 'unlabeled', 'dev', 3, [], 'unlabelled'])
def test_no_row_of_a_split_that_is_none_is_lost(name, tmp_path):
    table = reviews(split=[*PARTS[:8], *[name] * 4])
    table.loc[8:, 'stars'] = None
    sources = [table]
    if isinstance(name, str):
        table.to_csv(tmp_path / 'all.csv', index=False)
        sources += [{of: part for of, part in table.groupby('split')}, tmp_path / 'all.csv']
    more = dict(unlabelled=reviews(2, stars=None)) if name == 'unlabelled' else {}  # they are given twice
    for source in sources:
        with pytest.raises(ConfigError, match=str(name or 'split')) as error:
            kd.load_data(source, 'text_classification', OF_REVIEWS, **more)
        assert '\n' not in str(error.value)


def test_a_task_of_whole_texts_has_no_rows_without_a_label(tmp_path):
    for source, more in ((reviews(), dict(unlabelled=reviews())), (reviews(split=PARTS), {})):
        with pytest.raises(ConfigError, match='unlabelled'):
            kd.load_data(source, 'masked_lm', dict(text='body'), **more)


@pytest.mark.slow
def test_from_a_table_to_a_student_that_answers(small_teacher, rank_here, tmp_path):
    data = kd.load_data(questions(), columns=COLUMNS)
    said = []
    small = dict(smoke=True, study='api', max_length=32, ranks=1, say=said.append)
    teacher = kd.finetune(data, small_teacher, **small)
    of_student = dict(mixed=True, student_layers=[1], **small)
    student = kd.distil(data, teacher, **of_student)
    alone = kd.distil(data, teacher, taught=False, **of_student)
    assert student.record['factors']['network'] == 'student' and student.record['factors']['kd'] is True
    assert student.record['params_total'] < teacher.record['params_total']
    assert kd.load_run(student.run_id) == student and any(student.run_id in line for line in said)
    found = student.predict(question='what is thing number 3', candidates=['thing 3 is 0 and red', 'no'])
    assert len(found.answer.values) and found.latency_ms > 0 and repr(found) == str(found)
    typed = student.predict('what is thing number 3', ['thing 3 is 0 and red', 'no'])
    assert typed.answer == found.answer and student.evaluate() == student.metrics
    with pytest.raises(
        ConfigError, match='asked with question and candidates, in this order, and question is'
    ):
        student.predict('what', ['a'], question='what')
    with pytest.raises(ConfigError, match='and 3 are given'):
        student.predict('what', ['a'], 'b')
    with pytest.raises(KdnotesError, match='nothing was sent: .*sure=True'):
        student.push('nobody/nothing')
    with pytest.raises(KdnotesError, match='has no cls.predictions'):
        student.evaluate('embedded', sample=5)
    assert set(student.curves()['kind']) <= {'step', 'eval'} and student.card().startswith('---')
    assert (student.save(tmp_path / 'out') / 'model.safetensors').is_file()
    assert student.export(tmp_path / 'again')['run_id'] == student.run_id
    assert student.run_id in student._repr_html_() and student.run_id in repr(student)
    c = kd.compare(alone, student)
    assert (c.n_seeds, c.attribution.factor) == (1, 'kd')
    # its teacher is the run itself, under one name; trained otherwise, it is a model that is given
    assert student.record['teacher_run_id'] == alone.record['teacher_run_id'] == teacher.run_id
    longer = kd.finetune(data, small_teacher, **small | dict(epochs=2))
    other = kd.distil(data, longer, **small | dict(study='elsewhere'))
    assert other.record['settings']['teacher_mode'] == 'given'
    here = kd.distil(data, teacher, **small | dict(study='elsewhere'))
    assert here.record['teacher_run_id'] == teacher.run_id


def test_a_run_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="no finished run 'nothing'"):
        kd.load_run('nothing')


def table(**columns):
    "A table of ten questions of two sentences each."
    n = 20
    made = dict(question=[f'q{i // 2}' for i in range(n)], sentence=['yes', 'no'] * 10, label=[1, 0] * 10)
    return pd.DataFrame(made | columns)


HALF = pd.Series(['\ud800'] * 20, dtype=object)
REFUSED = [  # a source, what else is given, and what the refusal must name
    (questions(), dict(columns=dict(COLUMNS, label='wrong')), 'wrong'),
    (questions(1), dict(columns=COLUMNS), 'dev'),
    ({'train': questions()}, dict(columns=COLUMNS), 'dev, test'),
    ([1, 2, 3], {}, 'list'),
    (table(label=[None, *[1] * 19]), {}, 'label'),
    (table(), dict(columns=['sentence']), 'columns'),
    (table(), dict(columns='sentence'), 'columns'),
    (table(), dict(columns='sentence=answer'), 'answer'),
    (table(), dict(columns=dict(question='sentence', sentence='sentence')), 'sentence'),
    (table(), dict(columns=dict(score='teacher_score')), 'score'),
    (table(), dict(columns=dict(text=0)), "the key 'text'"),
    (table(), dict(columns=dict(sentence=['a'])), 'columns'),
    (table(), dict(columns=dict(question='sentence')), 'question'),
    (table(), dict(shares=5), 'shares'),
    (table(), dict(shares=('a', 'b', 'c')), 'shares'),
    (table(), dict(seed='x'), 'seed'),
    (table(), dict(seed=-1), 'seed'),
    (table(question=[['q']] * 20), {}, 'question'),
    (table(sentence=HALF), {}, 'train'),
    (table(split=['train'] * 15 + [None] * 5), {}, 'split'),
    (
        dict.fromkeys(['train', 'dev', 'test'], pd.DataFrame({'question;sentence;label': ['a;b;1']})),
        {},
        ';label',
    ),
]


@pytest.mark.parametrize(('source', 'given', 'named'), REFUSED)
def test_a_table_that_cannot_be_read_is_refused_in_a_sentence(source, given, named):
    with pytest.raises(KdnotesError, match=named) as error:
        kd.load_data(source, **given)
    assert '\n' not in str(error.value)


def test_what_is_no_data_or_no_run_is_refused():
    for call in (kd.finetune, kd.distil, kd.study, kd.doctor):
        with pytest.raises(KdnotesError, match='write kd.load_data'):
            call('embedded')
    with pytest.raises(KdnotesError, match='mode is chosen by'):
        kd.finetune(kd.load_data('embedded'), mode='full_kd')
    for a, b in ((), ()), ('x', 'y'):
        with pytest.raises(KdnotesError, match='two runs, or two lists'):
            kd.compare(a, b)


def test_data_show_how_much_there_is_and_their_first_rows():
    table = pd.DataFrame(
        [
            dict(question=f'Who found {i}?', sentence=f'{name} did {i}.', label=int(name == 'Ada'))
            for i in range(20)
            for name in ('Ada', 'Bob')
        ]
    )
    told = []
    said = repr(kd.load_data(table, say=told.append)).split('\n')
    assert said[0].startswith('Data for answer_selection: ')
    assert said[1] == 'train 16 questions (32 rows), dev 2 questions (4 rows), test 2 questions (4 rows)'
    assert said[2].split() == ['question', '|', 'sentence', '|', 'label'] and len(said) == 5
    assert len(told) == 1 and told[0].startswith(  # once: not in the repr, too
        '40 rows were split at random (seed=0): 32 for train, 4 for dev, 4 for test; rows with the same '
    )
    wrong = table.rename(columns=dict(sentence='answer'))
    with pytest.raises(KdnotesError, match='sentence.*columns='):
        kd.load_data(wrong)
    with pytest.raises(KdnotesError, match='line 1.*label'):
        kd.load_data(table.assign(label=11))


# ---- the same rows, whatever they come in ----


NUMBERS = [0.1 + 0.2, math.pi * 1e-7, 2.0, -1 / 3, 1e-300, 5e-324, 123456789.123456789, 7.0]


def labelled(labels, n=40):
    return pd.DataFrame(
        dict(text=[f'text {i}' for i in range(n)], label=[labels[i % len(labels)] for i in range(n)])
    )


@pytest.mark.parametrize('dtype', ['float64', 'float32', 'Float64'])
@pytest.mark.parametrize('kind', ['frame', 'dicts', 'dataset'])
def test_numbers_keep_their_last_bit_on_the_way_from_python(tmp_path, kind, dtype):
    table = labelled(NUMBERS).astype(dict(label=dtype))
    for split in ('train', 'dev', 'test'):
        table.to_csv(tmp_path / f'{split}.csv', index=False)
    if kind == 'dicts':
        given = table.to_dict('records')
    elif kind == 'dataset':
        given = pytest.importorskip('datasets').Dataset.from_pandas(table)
    else:
        given = table
    data = kd.load_data(dict.fromkeys(('train', 'dev', 'test'), given), 'text_classification')
    found = [row['label'] for row in load_corpus(data.task, data.corpus).splits['train']]
    of_csv = [row['label'] for row in load_corpus('text_classification', str(tmp_path)).splits['train']]
    same = np.float32 if dtype == 'float32' else float
    assert list(map(same, found)) == list(map(same, of_csv)) == [same(x) for x in table['label']]
    if kind == 'frame' and dtype != 'float32':
        assert load_corpus(data.task, data.corpus).sha256 == load_corpus(data.task, str(tmp_path)).sha256


def test_whole_numbers_stay_whole_beside_a_gap():
    rows = [dict(id=2**53 + 1 + i, text=f't{i}', label=i % 2) for i in range(9)] + [
        dict(id=None, text='t', label=1)
    ]
    with pytest.raises(CorpusError, match='id is empty'):
        kd.load_data(dict.fromkeys(('train', 'dev', 'test'), rows), 'text_classification')
    data = kd.load_data(dict.fromkeys(('train', 'dev', 'test'), rows[:9]), 'text_classification')
    assert load_corpus(data.task, data.corpus).splits['dev'][0]['id'] == '9007199254740993'


QUESTIONS = [
    dict(question='What is wet?', context='Rain is wet.', answer='Rain', answer_start=0, seen=None),
    dict(question='What is dry?', context='Rain is wet.', answer=None, answer_start=None, seen=None),
]


@pytest.mark.parametrize(
    'kind',
    ['dicts', 'frame', 'dataset', 'answers', 'answers of a frame', 'null', 'records', 'csv', 'parquet'],
)
def test_none_is_no_answer_and_other_columns_are_not_looked_at(tmp_path, kind):
    given = QUESTIONS
    hub = [
        dict(question=row['question'], context=row['context'], answers=dict(text=text, answer_start=start))
        for row, text, start in zip(QUESTIONS, (['Rain'], []), ([0], []))
    ]
    if kind == 'frame':
        given = pd.DataFrame(QUESTIONS)
    elif kind == 'dataset':
        given = pytest.importorskip('datasets').Dataset.from_list(QUESTIONS)
    elif kind == 'answers':
        given = pytest.importorskip('datasets').Dataset.from_list(hub)
    elif kind == 'answers of a frame':
        given = pytest.importorskip('datasets').Dataset.from_list(hub).to_pandas()
    elif kind == 'null':
        given = [hub[0], hub[1] | dict(answers=None)]
    elif kind == 'records':  # as in SQuAD's own files
        given = [hub[0] | dict(answers=[dict(text='Rain', answer_start=0)]), hub[1] | dict(answers=[])]
    if kind in ('csv', 'parquet'):
        table = pd.DataFrame(
            [row | dict(context=f'{row["context"]} {i}') for i in range(9) for row in QUESTIONS]
        )
        # the start is 0.0 there
        getattr(table, f'to_{kind}')(tmp_path / f'all.{kind}', index=False)
        data = kd.load_data(tmp_path / f'all.{kind}', 'extractive_qa')
    else:
        data = kd.load_data(dict.fromkeys(('train', 'dev', 'test'), given), 'extractive_qa')
    rows = load_corpus(data.task, data.corpus).splits['train']
    assert {row['question']: row['answers'] for row in rows} == {
        'What is wet?': [[0, 4]],
        'What is dry?': [],
    }


@pytest.mark.parametrize('kind', ['dataset', 'parquet'])
def test_classes_have_the_names_that_a_dataset_gives_them(tmp_path, kind):
    datasets = pytest.importorskip('datasets')
    features = datasets.Features(
        text=datasets.Value('string'), label=datasets.ClassLabel(names=['sad', 'glad', 'none of them'])
    )
    named = datasets.Dataset.from_pandas(labelled([2, 0, 1]), features=features)
    three = dict.fromkeys(('train', 'dev', 'test'), named)

    def load(tables):
        if kind == 'dataset':
            return kd.load_data(tables, 'text_classification')
        for split, of in tables.items():
            of.to_parquet(tmp_path / f'{split}.parquet')
        return kd.load_data(tmp_path, 'text_classification')

    rows = load_corpus('text_classification', load(three).corpus).splits['test']
    assert [row['label'] for row in rows[:4]] == ['none of them', 'sad', 'glad', 'none of them']
    # nobody's class stays none, and the answer to a question is 0 or 1 whatever it is called
    unlabelled = datasets.Dataset.from_pandas(labelled([2, 0, -1]), features=features)
    data = load(three | dict(dev=unlabelled, train=unlabelled))
    with pytest.raises(KdnotesError, match=r"label '-1' says that nobody .*remove such rows"):
        kd.doctor(data, smoke=True)
    yes_no = datasets.ClassLabel(names=['no', 'yes'])
    pairs = datasets.Dataset.from_pandas(table()).cast_column('label', yes_no)
    data = kd.load_data(dict.fromkeys(('train', 'dev', 'test'), pairs))
    assert {row['label'] for row in load_corpus(data.task, data.corpus).splits['dev']} == {0, 1}
    pairs = datasets.Dataset.from_pandas(table(label=[1, -1] * 10)).cast_column('label', yes_no)
    with pytest.raises(
        CorpusError, match='must be 0 or 1, or a grade .* to 10; correct it, or remove rows that nobody has'
    ):
        kd.load_data(dict.fromkeys(('train', 'dev', 'test'), pairs))


# ---- what people type ----


def test_help_says_what_a_function_takes():
    assert kd.__doc__ and 'kd.distil(data, teacher' in kd.__doc__
    for name in NAMES[2:]:
        said = getattr(kd, name).__doc__
        assert 'Parameters:' in said and 'Example:' in said, name
    assert 'teacher: of `finetune`, or the folder or hub id' in kd.distil.__doc__


@pytest.mark.exhaustive
def test_distill_is_distil_before_and_after_its_modules_are_there():
    code = """
import kdnotes as kd
for _ in range(2):
    try:
        kd.distill('embedded')
    except kd.api.ConfigError as e:
        print(e)
    import kdnotes.distill.heads
"""
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert done.stdout.count('str is not what load_data gives') == 2


def test_a_model_without_a_folder_is_refused_in_a_sentence():
    data = kd.Data('answer_selection', 'embedded')
    model = pytest.importorskip('torch').nn.Linear(1, 1)
    for call in (kd.distil, kd.finetune, lambda *of: kd.study(of[0], teacher=of[1])):
        with pytest.raises(
            ConfigError, match=r'a Linear is no folder.* model.save_pretrained\(folder\) and tok'
        ):
            call(data, model)


@pytest.mark.parametrize(
    ('name', 'said'),
    [
        ('temp', "is it 'temperature'"),
        ('warmup', "is it 'warmup_fraction'"),
        ('collator', '`kdnotes parameters` lists them all'),
    ],
)
def test_a_hint_is_near_or_there_is_none(name, said):
    with pytest.raises(ConfigError, match=said):
        kd.finetune(kd.Data('answer_selection', 'embedded'), **{name: 1})
