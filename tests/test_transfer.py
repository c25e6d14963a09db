"""A corpus learnt first: one start for all arms and seeds, found by its run;
and the pairs made of the real SQuAD, where there is a copy.
"""

import pytest
from kdnotes.stats.comparable import attribute
from kdnotes.core.arms import MODES
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.tasks.sources import load_corpus
from kdnotes.tasks.candidates import SCHEMA, SQUAD_FILES
from kdnotes.experiment.launch import execute
from kdnotes.experiment.plan import plan
from kdnotes.experiment.study_plan import plan_study
from kdnotes.results.runs import RunFolder
from kdnotes.tasks.passages import from_hub, read_squad
from handmade import make_record

ON = Machine('cpu', 2)


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    "The embedded corpus under other names, as a folder: another corpus to kdnotes."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    folder = tmp_path / 'mine'
    folder.mkdir()
    for split, rows in load_corpus('answer_selection', 'embedded').splits.items():
        lines = [
            '\t'.join(SCHEMA.names.values()),
            *(
                '\t'.join(str(r[k]) for k in SCHEMA.names)
                for r in rows
                if r['question_id'] != rows[0]['question_id']  # another corpus than the embedded one
            ),
        ]
        (folder / f'{split}.tsv').write_text('\n'.join(lines) + '\n', encoding='utf-8')
    return str(folder)


def test_all_arms_and_seeds_start_from_one_run(corpus):
    plans = [
        plan(make_config(mode=mode, seed=seed, corpus='embedded', transfer=corpus), ON)
        for mode, seed in (*((mode, 0) for mode in MODES), ('full_kd', 1))
    ]
    starts = {(p.transfer or p.teacher.transfer).run_id for p in plans}
    assert len(starts) == 1 and all(p.teacher.transfer.run_id in starts for p in plans if p.teacher)
    first = next(p.transfer for p in plans if p.transfer)
    assert (
        first.config.where.mode,
        first.config.seed,
        first.config.data.corpus,
        first.config.where.study,
    ) == (
        'mixed_baseline',
        0,
        corpus,
        'mine',
    )
    tried = plan(
        make_config(
            mode='full_student',
            corpus='embedded',
            transfer=corpus,
            student_init='transferred',
            smoke=True,
            study='embedded-smoke',
        ),
        ON,
    )
    assert {
        p.config.where.study
        for p in (tried.transfer, tried.transfer.teacher, tried.transfer.teacher.transfer)
        if p
    } == {'mine-smoke'}, 'a try stays out of the evidence of the corpus learnt first'
    without = plan(make_config(mode='baseline', corpus='embedded'), ON)
    assert without.transfer is None and without.run_id not in {p.run_id for p in plans}


def test_a_transferred_student_is_taught_by_the_transferred_teacher(corpus):
    p = plan(make_config(mode='full_kd', corpus='embedded', transfer=corpus, student_init='transferred'), ON)
    assert p.initial == dict(transfer_run_id=p.transfer.run_id) and p.transfer.config.where.mode == 'mixed_kd'
    assert p.transfer.teacher.run_id == p.teacher.transfer.run_id
    assert p.transfer.initial == dict(teacher_run_id=p.transfer.teacher.run_id, layers=[1, 3, 5])
    with pytest.raises(ConfigError, match='needs transfer=<corpus>'):
        make_config(mode='full_kd', student_init='transferred')


def test_kd_is_one_factor_for_students_that_start_from_their_own_transfer():
    "A student without KD then has no teacher at all; what a teacher brings with it belongs to KD."
    a, b = (
        make_record(mode=mode, transfer='squad1', student_init='transferred')
        | dict(initial=dict(transfer_run_id='t'))
        for mode in ('full_student', 'full_kd')
    )
    assert a['settings']['teacher_questions'] is None and b['settings']['teacher_questions'] == 'all'
    assert attribute((a, b | dict(teacher_run_id='x'))).factor == 'kd'


@pytest.mark.exhaustive
def test_a_study_reads_each_corpus_once(corpus, monkeypatch):
    asked = []
    monkeypatch.setattr(
        'kdnotes.tasks.sources.load_corpus',
        lambda task, corpus, *more: asked.append(corpus) or load_corpus(task, corpus, *more),
    )
    plan_study(2, 'all', corpus='embedded', transfer=corpus, student_init='transferred')
    assert sorted(asked) == sorted(['embedded', corpus])


def test_a_folder_with_wikiqa_has_the_settings_of_wikiqa(corpora, tmp_path, monkeypatch):
    if not (corpora / 'wikiqa').is_dir():
        pytest.skip('no WikiQA here')
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    p = plan(make_config(mode='full_kd', corpus=str(corpora / 'wikiqa')), ON)
    usual = plan(make_config(mode='full_kd', corpus='wikiqa'), ON)
    assert (
        p.config.data.corpus == str(corpora / 'wikiqa')
        and p.config.train.learning_rate == usual.config.train.learning_rate
        and p.teacher.config.train.epochs == usual.teacher.config.train.epochs
    )
    # the same science under two names
    assert (p.run_id, p.teacher.run_id) == (usual.run_id, usual.teacher.run_id)


@pytest.mark.exhaustive
def test_the_hub_and_the_file_give_the_same_paragraphs(corpora):
    if not (files := [f for n in SQUAD_FILES if (f := corpora / 'squad1' / n).exists()]):
        pytest.skip('no SQuAD 1.1 here')
    paragraphs = read_squad(files[0])
    rows = [
        dict(
            id=q['id'],
            title=q['cluster'],
            context=q['context'],
            question=q['question'],
            answers=[dict(text=q['context'][a:b], answer_start=a) for a, b in q['answers']],
        )
        for questions in paragraphs
        for q in questions
    ]
    again = from_hub({k: [r[k] for r in rows] for k in rows[0]})
    assert len(again) == len(paragraphs) == 18896 and again == paragraphs


@pytest.mark.slow
@pytest.mark.exhaustive
def test_weights_and_head_are_handed_on(corpus):
    p = plan(
        make_config(
            mode='mixed_student',
            corpus='embedded',
            transfer=corpus,
            student_init='transferred',
            smoke=True,
            ranks=1,
            threads_per_rank=1,
        ),
        ON,
    )
    record = execute(p)
    first = RunFolder(p.transfer.config.where.study, p.transfer.run_id).record()
    teacher = RunFolder(p.transfer.teacher.config.where.study, p.transfer.teacher.run_id).record()
    # the student's first step continues from its transfer
    assert record['initial']['start_sha256'] == first['model_sha256']
    assert (
        record['factors']['transfer'] == corpus
        and record['time']['transfer_s'] == first['time']['total_s'] > first['time']['train_s']
    )
    baseline = execute(
        plan(
            make_config(
                mode='mixed_baseline', corpus='embedded', transfer=corpus, smoke=True, threads_per_rank=1
            ),
            ON,
        )
    )
    # and the baseline's from the teacher's, head included
    assert baseline['initial']['start_sha256'] == teacher['model_sha256']
