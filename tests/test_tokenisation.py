"""What a tokenizer makes of a corpus: the plan warns of unknown words and refuses a tokenizer that knows few;
the record counts unknown tokens, rows that are cut, rows without tokens, and rows of dev and test that have
the tokens of a row of train.
"""

from dataclasses import replace
import numpy as np
import pytest
import transformers
from handmade import make_record, write_run
from letters import of_words
from small_runs import planned, small_model, write_model
from tokenizers import normalizers, pre_tokenizers
from kdnotes import cli
from kdnotes.core.config import TASKS
from kdnotes.core.parse import make_config
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.weights import MINILM, ModelError
from kdnotes.experiment.compatibility import make_task
from kdnotes.experiment.study_plan import explain_study, plan_study
from kdnotes.experiment.plan import plan
from kdnotes.experiment.record import _tokenisation
from kdnotes.report.report import report_of
from kdnotes.results.schema import RecordError, check_record
from kdnotes.stats.evidence import evidence
from kdnotes.tasks import batching
from kdnotes.tasks.answer_selection import TASK as PAIRS
from kdnotes.tasks.batching import EncodedPairs, Ragged, rows_in
from kdnotes.tasks.sources import corpus_of, load_corpus, local_copy
from kdnotes.core.spec import with_values

FEW, SOME, MOST = 'a salty sea', 'abc abc abc SALT', 'SALT IS WHITE'
TASK = 'text_classification'


def write_texts(folder, train, dev=FEW, test=FEW):
    "A corpus of two classes."
    folder.mkdir()
    for split, text in dict(train=train, dev=dev, test=test).items():
        rows = [f'{text},{label}' for label in 'nm' * 10]
        (folder / f'{split}.csv').write_text('\n'.join(['text,label', *rows]) + '\n', encoding='utf-8')
    return str(folder)


def speller(folder, lower=False):
    "A model with a tokenizer that knows the letters a to z, and capital letters if it makes them small."
    write_model(folder)
    words = {token: i for i, token in enumerate((folder / 'vocab.txt').read_text().splitlines())}
    transformers.BertTokenizer(vocab=words, do_lower_case=lower).save_pretrained(folder)
    return str(folder)


def reader(folder, words):
    "A model with a tokenizer that knows these words."
    write_model(folder)
    (folder / 'vocab.txt').unlink()
    of_words(words).save_pretrained(folder)
    return str(folder)


# ---- the plan ----


@pytest.mark.parametrize('check', [False, True])
@pytest.mark.parametrize(
    'texts, lower, share',
    [
        (dict(train=FEW), False, ''),
        (dict(train=MOST), True, ''),
        (dict(train=SOME), False, '10% of the tokens in 20 rows of train are unknown'),
        (dict(train=FEW, test=SOME), False, '10% of the tokens in 20 rows of test are unknown'),
        (
            dict(train=SOME, dev=SOME),
            False,
            '10% of the tokens in 20 rows of train and 10% in 20 rows of dev',
        ),
        (dict(train=MOST), False, '100% of the tokens in 20 rows of train are unknown'),
        (dict(train=FEW, dev='соль белая'), True, '100% of the tokens in 20 rows of dev are unknown'),
    ],
)
def test_a_vocabulary_of_another_case_or_language(texts, lower, share, check, home):
    model = speller(home / 'model', lower)
    corpus = write_texts(home / 'corpus', **texts)
    config = make_config(mode='baseline', task=TASK, corpus=corpus, teacher=model, max_length=32)
    if share.startswith('100%'):
        with pytest.raises(
            ModelError, match=f'{share}.* tokenizer of {model}; use a model for the lang'
        ) as e:
            plan(config, check=check)
        assert '\n' not in str(e.value) and e.value.exit_code == 2
        return
    found = plan(config, check=check)
    assert len(found.texts) == bool(share)
    assert (share in found.explain() and f'to the tokenizer of {model}' in found.explain()) == bool(share)
    if not share:
        assert 'unknown' not in found.explain()


def test_a_command_refuses_it_in_one_line(home, capsys):
    given = ['--task', TASK, '--corpus', write_texts(home / 'corpus', 'соль белая')]
    given += ['--teacher', speller(home / 'model'), '-p', 'max_length=32']
    assert cli.main(['run', '--mode', 'baseline', '--dry-run', *given]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if 'unknown' in line]
    assert '100% of the tokens' in line and 'rows of train' in line and 'use a model for the language' in line


def test_a_plan_names_each_tokenizer_that_knows_few_words(home):
    some = speller(home / 'some')
    sees = str(small_model(home / 'sees'))
    given = dict(task=TASK, corpus=write_texts(home / 'corpus', SOME), max_length=32, student_init='hub')
    for student, teacher in ((some, sees), (sees, some)):
        models = dict(student=student, teacher=teacher)
        assert (
            f'to the tokenizer of {some}'
            in plan(make_config(mode='full_kd', **models, **given), check=False).explain()
        )
        arms = plan_study(1, 'baseline,full_kd', check=False, **models, **given)
        assert explain_study(arms).count(f'to the tokenizer of {some}') == 1


@pytest.mark.parametrize('task', TASKS)
def test_each_task_refuses_a_tokenizer_that_knows_no_word(task, home):
    "Of its own network, of its teacher, of a given teacher, and of a student that reads by itself."
    blind = reader(home / 'blind', ['соль', 'белая'])
    sees = small_model(home / 'sees')
    cases = [
        dict(mode='baseline', teacher=blind),
        dict(mode='full_kd', teacher=blind, student_layers=(1,)),
        dict(mode='full_student', teacher=str(sees), student=blind, student_init='hub'),
    ]
    if task not in ('masked_lm', 'extractive_qa'):
        cases.append(dict(mode='baseline', teacher=blind, teacher_mode='given'))
    for case in cases:
        config = make_config(task=task, corpus='embedded', max_length=96, **case)
        with pytest.raises(
            ModelError, match=f'rows of train.* are unknown to the tokenizer of {blind}; use a'
        ):
            plan(config, check=False)


def test_a_tokenizer_of_bytes_has_no_unknown_token(home):
    folder = home / 'model'
    write_model(folder)
    (folder / 'vocab.txt').unlink()
    of_bytes().save_pretrained(folder)
    corpus = write_texts(home / 'corpus', 'соль белая')
    config = make_config(mode='baseline', task=TASK, corpus=corpus, teacher=str(folder), max_length=64)
    assert plan(config, check=False).texts == ()


def test_a_long_text_is_judged_by_more_than_its_beginning(home):
    "Documents that begin in English and go on in another language."
    corpus = home / 'corpus'
    corpus.mkdir()
    for split in ('train', 'dev', 'test'):
        (corpus / f'{split}.txt').write_text('a salty sea ' * 100 + 'соль белая ' * 40_000, encoding='utf-8')
    config = dict(mode='baseline', task='masked_lm', corpus=str(corpus), max_length=64)
    with pytest.raises(ModelError, match='of the tokens in 1 row of train'):
        plan(make_config(**config, teacher=speller(home / 'model')), check=False)


# ---- the report ----


def test_a_report_names_what_is_not_zero(home):
    rows = dict(train=200, dev=10, test=20)
    zero = dict.fromkeys(rows, 0)
    found = dict(
        rows=rows, tokens={split: 10 * n for split, n in rows.items()}, unknown=zero | dict(train=30)
    )
    found |= dict(cut=None, empty=zero, overlap=dict(dev=0, test=5))
    why = dict(reasons={'tokenisation.cut': 'read in windows'})
    record = make_record('full_kd', 0)
    with pytest.raises(RecordError, match="'tokenisation.cut' is null without a reason"):
        check_record(record | dict(tokenisation=found))
    write_run(record | dict(tokenisation=found, reasons=record['reasons'] | why['reasons']))
    write_run(make_record('full_student', 0))  # of before
    setting = report_of(evidence('made'), {}).setting
    told = [line for line in setting if 'tokens' in line and 'texts of up to' not in line]
    assert told == [
        'Unknown tokens: 30 of 2,000 tokens of train (1.5%) (full_kd).',
        'Same tokens as a row of train: 5 of 20 rows of test (25%) (full_kd).',
    ]


# ---- the counts ----


def of_bytes():
    "As RoBERTa's: it knows every byte, and tells no segments."
    special = ['<s>', '<pad>', '</s>', '<unk>', '<mask>']
    vocabulary = {
        token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=[])


def small_letters():
    tokenizer = of_words('abcdefgh')
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    return tokenizer


def counted_by_hand(tokenizer, first, second, max_length):
    "Each row for itself: tokens, unknown ones, rows that are cut, rows with a text without tokens."
    tokens = unknown = cut = empty = 0
    special = tokenizer.num_special_tokens_to_add(pair=second is not None)
    for i, text in enumerate(first):
        texts = [[text]] if second is None else [[text], [second[i]]]  # an empty text alone is none
        [whole] = tokenizer(*texts, truncation=False)['input_ids']
        [ids] = tokenizer(*texts, truncation='longest_first', max_length=max_length)['input_ids']
        alone = [tokenizer(of, add_special_tokens=False, truncation=False)['input_ids'][0] for of in texts]
        tokens += len(ids) - special
        unknown += ids.count(tokenizer.unk_token_id)
        cut += len(whole) > max_length
        empty += not all(alone)
    return tokens, unknown, cut, empty


@pytest.mark.parametrize('kept', [False, True])
@pytest.mark.parametrize('pair', [False, True])
@pytest.mark.parametrize('make', [small_letters, of_bytes])
def test_counts_are_those_of_each_row_for_itself(make, pair, kept, tmp_path, monkeypatch):
    monkeypatch.setattr(batching, 'ROWS_AT_ONCE', 4)
    rng = np.random.default_rng(3)
    words = ['a', 'B', 'ç', 'x', ' ', '']

    def texts(n):
        return [' '.join(rng.choice(words, rng.integers(0, 14))) for _ in range(n)]

    first, second = texts(41), texts(41) if pair else None
    tokenizer = make()
    folder = tmp_path if kept else None
    for _ in range(2):  # made, and read
        found = EncodedPairs.from_texts(tokenizer, dict(train=(first, second)), 9, folder).counts['train']
        tokens, unknown, cut, empty = counted_by_hand(tokenizer, first, second, 9)
        assert cut and empty, 'the case has both'
        assert (found.rows, found.tokens, found.cut, found.empty) == (41, tokens, cut, empty)
        assert found.unknown == (None if make is of_bytes else unknown)


def test_equal_rows_are_found():
    rng = np.random.default_rng(0)
    for values in (1, 2, 40):
        rows, others = (
            [rng.integers(0, values, rng.integers(0, 6)).tolist() for _ in range(60)] for _ in 'ab'
        )
        right = sum(row in others for row in rows)
        assert rows_in(Ragged.from_rows(rows), Ragged.from_rows(others)) == right
    assert rows_in(Ragged.from_rows([]), Ragged.from_rows([[1]])) == 0
    assert rows_in(Ragged.from_rows([[1], [1]]), Ragged.from_rows([])) == 0


def louder(row: dict) -> dict:
    "The row in capital letters and other spaces: the same tokens where a tokenizer ignores both."
    keys = ('text', 'second', 'question', 'sentence', 'sentence1', 'sentence2', 'first', 'context')
    return row | {key: row[key].upper() for key in keys if isinstance(row.get(key), str)}


@pytest.mark.parametrize('task', TASKS)
def test_each_task_counts_its_corpus(task, home):
    config = planned(task, 'full_kd', small_model(home / 'teacher')).config
    whole = corpus_of(config)
    n = 4 if task == 'masked_lm' else 30
    splits = {split: list(rows)[:n] for split, rows in whole.splits.items()}
    known = {row.get('label') for row in splits['train']}
    trained = next((row for row in splits['train'] if row.get('label') == 1), splits['train'][0])
    for split in ('dev', 'test'):
        rows = [row for row in splits[split] if row.get('label') in known]
        splits[split] = [*rows, louder(trained)]
    made = make_task(with_values(config, smoke=False), replace(whole, splits=splits))
    tokenizer = load_tokenizer(MINILM)
    made.encode(tokenizer)
    found = _tokenisation(made)
    assert found['overlap']['test'] == found['overlap']['dev'] == 1, 'in capital letters'
    assert made.token_counts().keys() >= {'train', 'dev', 'test'}
    for split in ('train', 'dev'):
        rows = made.rows[split]
        if task == 'embeddings':  # each query and text is read once
            texts = [*made.collections[split].queries, *made.collections[split].texts]
            assert found['rows'][split] == len(texts) < 2 * len(rows)
            assert found['tokens'][split] == sum(counted_by_hand(tokenizer, texts, None, 48)[:1])
            continue
        assert found['rows'][split] == len(rows)
        if task == 'masked_lm':
            ids = [tokenizer(row['text'], add_special_tokens=False)['input_ids'] for row in rows]
            assert found['tokens'][split] == sum(map(len, ids))
            assert found['unknown'][split] == sum(of.count(tokenizer.unk_token_id) for of in ids)
            assert (found['cut'], made.uncut) == (None, 'read_in_blocks')
        elif task == 'extractive_qa':
            ids = list(made.windows[split].ids)
            assert found['tokens'][split] == sum(map(len, ids)) - 3 * len(ids)
            assert (found['cut'], made.uncut) == (None, 'read_in_windows')
        else:
            tokens, unknown, cut, empty = counted_by_hand(
                tokenizer, *made.texts_of(rows), config.data.max_length
            )
            counts = tuple(found[name][split] for name in ('tokens', 'unknown', 'cut', 'empty'))
            assert counts == (tokens, unknown, cut, empty)
        assert found['empty'][split] == 0


def test_a_question_without_tokens_is_counted(home):
    config = planned('extractive_qa', 'full_kd', small_model(home / 'teacher')).config
    whole = corpus_of(config)
    splits = {split: list(rows)[:5] for split, rows in whole.splits.items()}
    splits['train'][2] = splits['train'][2] | dict(question='\u200b')
    made = make_task(with_values(config, smoke=False), replace(whole, splits=splits))
    made.encode(load_tokenizer(MINILM))
    assert [made.token_counts()[split].empty for split in ('train', 'dev')] == [1, 0]


def test_more_of_wikiqa_is_equal_to_its_network_than_to_a_reader(corpora):
    if not local_copy('wikiqa', PAIRS.corpora):
        pytest.skip('no copy of WikiQA in $KDNOTES_DATA/wikiqa')
    corpus = load_corpus('answer_selection', 'wikiqa')
    texts = {
        split: ([row['question'] for row in rows], [row['sentence'] for row in rows])
        for split, rows in corpus.splits.items()
    }
    pairs = EncodedPairs.from_texts(load_tokenizer(MINILM), texts, 128)
    for split in ('dev', 'test'):
        in_tokens = rows_in(pairs.splits[split][0], pairs.splits['train'][0])
        assert corpus.overlap.get(split, 0) <= in_tokens <= corpus.overlap.get(split, 0) + 10
        assert 0 < pairs.counts[split].unknown < 0.01 * pairs.counts[split].tokens
