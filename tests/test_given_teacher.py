"""A fine-tuned model is taken as it is: measured, recorded, learnt from, never trained;
a wrong head is refused.
"""

import json
from contextlib import ExitStack
from pathlib import Path
import numpy as np
import pytest
from kinds import one_of_each
import torch
import transformers as hf
from types import SimpleNamespace
from architectures import configs, write_teacher
from handmade import make_record, write_run
from kdnotes import cli
from kdnotes.stats.comparable import differences
from kdnotes.stats.compare import compare
from kdnotes.report.report import report
from kdnotes.core.render import phrase, reason
from kdnotes.checks.doctor import doctor
from kdnotes.core.config import KdnotesError
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.distill import models, tokenizers, weights
from kdnotes.distill.architectures import call, weights_sha256
from kdnotes.distill.models import load_given, load_model, two_outputs
from kdnotes.experiment.card import model_card
from kdnotes.experiment.study_plan import forecast
from kdnotes.experiment.launch import execute, run
from kdnotes.experiment.predict import predict
from kdnotes.experiment.study_plan import explain_study, plan_study
from kdnotes.experiment.compatibility import make_task
from kdnotes.experiment.plan import plan
from kdnotes.experiment.study import _compared
from kdnotes.results.runs import RunFolder, lock_run
from kdnotes.results.store import find_record, find_run_model
from kdnotes.tasks.sources import load_corpus
from kdnotes.core.spec import RunConfig

HEAD = 'AutoModelForSequenceClassification'
CPU = Machine('cpu', 2)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    "Runs and caches of the test's own; no real hub is asked."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setattr(weights.hub_constants, 'HF_HUB_OFFLINE', True)


def teacher_with(folder: Path, outputs: int = 2, kind: str = 'bert', **of_config) -> Path:
    "A random classifier with so many outputs."
    config = configs(2)[kind]
    config.num_labels = outputs
    for name, value in of_config.items():
        setattr(config, name, value)
    return write_teacher(folder / f'{kind}-{outputs}', config)


def asked(folder, mode='baseline', **given):
    shared = dict(corpus='embedded', smoke=True, teacher_mode='given', teacher=str(folder), ranks='auto')
    if mode != 'baseline':
        shared |= dict(student_layers=(1,), ranks=1, epochs=1)
    return make_config(mode=mode, **shared | given)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def measured_by_hand(folder, config) -> dict:
    "The metrics by plain transformers, one pair at a time."
    task = make_task(config, load_corpus(config.task, 'embedded'))
    task.encode(tokenizers.load_tokenizer(folder))
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    scores = {}
    for split in task.evaluation_sets:
        found = []
        for i in range(len(task.lengths(split))):
            inputs = task.batch(split, np.array([i])).inputs
            with torch.no_grad():
                logits = call(model, inputs).logits[0]
            if config.task == 'text_classification':
                found.append(logits.tolist())
            else:
                found.append([logits[0].item() if len(logits) == 1 else (logits[1] - logits[0]).item()])
        scores[split] = np.array(found, dtype=np.float32)
    return task.evaluate(scores).metrics


# ---- the head ----


@pytest.mark.parametrize('kind', configs(2))
def test_one_output_becomes_two_with_the_same_answers(kind, tmp_path):
    folder = teacher_with(tmp_path, 1, kind)
    plain = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    model = load_given(folder, HEAD, ('0', '1'))
    ids = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    with torch.no_grad():
        z = call(plain, inputs).logits[:, 0]
        both = call(model, inputs).logits
    assert both.shape == (3, 2) and torch.equal(both[:, 0], torch.zeros(3)) and z.std() > 1e-3
    assert torch.allclose(both.softmax(1)[:, 1], z.sigmoid(), atol=1e-6)
    again = load_model(models.save_model(model, tmp_path / 'saved'), HEAD, 0, num_labels=2)
    assert weights_sha256(again) == weights_sha256(model) and load_given(folder, HEAD, None).num_labels == 1


def test_a_model_without_a_single_output_has_none_to_make_two_of():
    with pytest.raises(KdnotesError, match='no linear layer with one output'):
        two_outputs(hf.AutoModelForSequenceClassification.from_config(configs(2)['bert']))


# ---- its run ----


@pytest.mark.parametrize('outputs', one_of_each([1, 2]))
def test_a_given_teacher_is_measured_and_a_student_learns_from_it(outputs, tmp_path, rank_here):
    trained_on = dict(problem_type='regression') if outputs == 1 else {}
    folder = teacher_with(tmp_path, outputs, **trained_on)
    before = files_of(folder)
    said = []
    student = run(asked(folder, 'full_kd'), say=said.append)
    found = RunFolder(student['study'], student['teacher_run_id'])
    given = found.record()
    doing = [
        (line.split()[0], line.split()[1].rstrip(':')) for line in said if line.endswith(('fp32', 'bf16'))
    ]
    assert any(f"needs {given['run_id']} first" in line for line in said)
    assert doing == [('measuring', given['run_id']), ('training', student['run_id'])]
    assert given['run_id'] == plan(asked(folder)).run_id
    by_hand = measured_by_hand(folder, plan(asked(folder)).config)
    for name, metrics in by_hand.items():
        assert given['metrics'][name].keys() == metrics.keys()
        for metric, value in metrics.items():
            assert given['metrics'][name][metric] == pytest.approx(value, abs=1e-5), (name, metric)
    assert (given['steps'], given['examples'], given['time']['train_s']) == (0, 0, 0.0)
    assert given['mode'] == 'baseline' and given['factors']['init'] == 'given'
    assert given['settings']['teacher_mode'] == 'given' and given['settings']['epochs'] is None
    assert given['reasons']['throughput.examples_per_s'] == 'a given teacher is not trained'
    assert (
        given['phases'].keys() == {'evaluation'} and given['model_sha256'] == given['initial']['start_sha256']
    )
    assert len(found.table('units')) and len(found.table('predictions'))
    plain = hf.AutoModelForSequenceClassification.from_pretrained(find_run_model(given['run_id']))
    assert plain.config.id2label == {0: 'no answer', 1: 'answer'}
    assert student['initial']['teacher_run_id'] == given['run_id'] and student['steps'] > 0
    assert student['settings']['teacher_mode'] == 'given'
    assert files_of(folder) == before, 'the folder that was given stays as it was'
    # their cards speak of a model that was brought
    card = model_card(given['run_id']).text
    assert 'measured without training by kdnotes' in card and '## Reproduce the measurement' in card
    assert '- Training: none' in card and '- Training time' not in card and 'pretrained model' not in card
    own = model_card(student['run_id']).text
    assert '- Teacher: the given model' in own and 'Training time of the teacher' not in own
    assert '- Weights start from: a local folder (given, fine-tuned model)' in own


@pytest.mark.exhaustive
def test_a_given_teacher_that_another_process_measures_is_waited_for(tmp_path, rank_here):
    planned = plan(asked(teacher_with(tmp_path), 'full_kd'))
    teacher = RunFolder(planned.teacher.config.where.study, planned.teacher.run_id).create()
    said = []
    with ExitStack() as other:
        other.enter_context(lock_run(teacher))

        def hear(text):
            said.append(text)
            if 'is waited for' in text:
                other.close()

        record = execute(planned, say=hear)
    assert f'{teacher.run_id} is made by another process, which is waited for' in said
    assert record['teacher_run_id'] == teacher.run_id and teacher.done


@pytest.mark.exhaustive
def test_the_doctor_examines_a_given_cross_encoder_and_its_student(tmp_path):
    folder = teacher_with(tmp_path, 1)
    found = doctor([asked(folder, mode) for mode in ('baseline', 'full_kd')])
    times = {f.mode: f.code for f in found.findings if f.check == 'time'}
    assert times == {'baseline': 'never_trained', 'full_kd': 'no_finished_run'}
    measured = {f.check: f.result for f in found.findings if f.mode == 'baseline'}
    assert [check for check, result in measured.items() if result != 'skipped'] == ['heads']
    assert not [f for f in found.findings if f.result == 'fail']
    assert not [note for note in found.notes if 'does not exist yet' in note], (
        'the given model is the teacher'
    )


def test_its_name_does_not_depend_on_a_training(tmp_path):
    folder = teacher_with(tmp_path)
    other = teacher_with(tmp_path / 'other', initializer_range=0.1)
    students = [
        plan(asked(folder, 'full_kd', **given), CPU)
        for given in (dict(), dict(epochs=3), dict(batch_size=8, head_bias='zero', learning_rate=1e-3))
    ]
    names = {p.teacher.run_id for p in students} | {plan(asked(folder), CPU).run_id}
    assert len(names) == 1 and len({p.run_id for p in students}) == 3
    trained = plan(make_config(mode='baseline', corpus='embedded', smoke=True, teacher=str(folder)), CPU)
    names |= {trained.run_id, plan(asked(other), CPU).run_id, plan(asked(folder, max_length=64), CPU).run_id}
    assert len(names) == 4, 'and on the weights and the length of its texts it does'
    told = students[0].explain()
    assert f'teacher: {folder}, fine-tuned already, not trained, texts of up to 128 tokens' in told
    assert 'the given teacher' in told and students[0].teacher.run_id in told


def test_the_baseline_of_a_study_is_the_given_model(tmp_path):
    folder = teacher_with(tmp_path)
    shared = dict(
        corpus='embedded', smoke=True, teacher=str(folder), teacher_mode='given', student_layers=(1,)
    )
    found = {
        p.config.where.mode: p
        for p in plan_study(1, 'baseline,full_kd,mixed_kd', epochs=2, batch_size=8, **shared)
    }
    assert {p.teacher.run_id for p in found.values() if p.teacher} == {found['baseline'].run_id}
    assert found['baseline'].run_id == found['full_kd'].teacher.run_id
    told = explain_study(list(found.values()))
    assert f'teacher: {folder}, fine-tuned already' in told and 'taught by' not in told
    assert 'not trained, texts of up to 128 tokens (baseline)' in told
    alone = forecast([found['full_kd']])
    assert [(line['state'], line['planned'], line['is_given']) for line in alone] == [
        ('pending', False, True),
        ('pending', True, False),
    ]
    assert [phrase('plan.txt.jinja', 'state', line) for line in alone] == ['measured first', 'to train']
    [baseline] = [line for line in forecast(list(found.values())) if line['mode'] == 'baseline']
    assert phrase('plan.txt.jinja', 'state', baseline) == 'to measure'
    for arms in ('all', 'baseline,parallel_baseline', 'mixed_baseline'):
        with pytest.raises(KdnotesError, match="mode='(parallel|mixed)_baseline' would train it"):
            plan_study(1, arms, **{k: v for k, v in shared.items() if k != 'student_layers'})
    with pytest.raises(KdnotesError, match='epochs would play no part'):
        plan_study(1, 'baseline', epochs=2, **{k: v for k, v in shared.items() if k != 'student_layers'})


# ---- refusals ----


def refused(config, words):
    with pytest.raises(KdnotesError, match=words) as caught:
        plan(config, CPU)
    assert '\n' not in str(caught.value)


def classification(folder, **given):
    return asked(folder, task='text_classification', **given)


@pytest.mark.exhaustive
def test_a_study_shows_the_teacher_that_it_measured_though_it_is_no_arm():
    by_arm = {
        arm: [make_record(arm, seed, value) for seed in (0, 1)]
        for arm, value in (('baseline', 0.8), ('full_student', 0.7), ('full_kd', 0.72))
    }
    for record in sum(by_arm.values(), []):
        write_run(record)
    study = by_arm['baseline'][0]['study']
    plans = [
        SimpleNamespace(
            config=RunConfig(where=dict(study=study)),
            run_id=record['run_id'],
            teacher=SimpleNamespace(run_id=teacher['run_id']),
        )
        for arm in ('full_student', 'full_kd')
        for record, teacher in zip(by_arm[arm], by_arm['baseline'])
    ]
    made = _compared(plans, {})
    assert 'the teacher baseline' in ' '.join(made.report.headline) and 'baseline' in made.table.read_text()
    # one that another study has made is not this one's
    for record in by_arm['baseline']:
        RunFolder(study, record['run_id']).path.rename(
            RunFolder(study, record['run_id']).path.with_suffix('.aside')
        )
    assert 'baseline' not in _compared(plans, {}).table.read_text()


def test_a_head_of_other_outputs_is_refused(tmp_path):
    refused(
        asked(teacher_with(tmp_path, 3)),
        'has 3 outputs, and the task has 2 classes; give .* 2 outputs, or 1',
    )
    two = load_corpus('text_classification', 'embedded')
    classes = sorted({row['label'] for row in two.splits['train']})
    wrong = teacher_with(tmp_path / 'more', len(classes) + 1)
    refused(
        classification(wrong), rf'has {len(classes) + 1} outputs, and the task has {len(classes)} classes'
    )
    with pytest.raises(KdnotesError, match='cannot be given as a teacher of numbers'):
        load_given(teacher_with(tmp_path / 'number', 1), HEAD, ())


def three_colours(folder: Path) -> Path:
    "A corpus of three classes."
    folder.mkdir()
    colours = ['red', 'green', 'blue']
    for split, n in dict(train=48, dev=12, test=12).items():
        rows = [dict(text=f'{colours[i % 3]} {split} {i}', label=colours[i % 3]) for i in range(n)]
        (folder / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize('whose', ['baseline', 'full_student'])
@pytest.mark.parametrize('config_says', [2, 3])
def test_a_head_of_another_size_is_replaced_where_a_model_is_fine_tuned(
    whose, config_says, tmp_path, capsys, rank_here
):
    "Two outputs, on a corpus of three classes, through the command: whatever config.json says of the head."
    folder = teacher_with(tmp_path / 'two', 2, 'roberta')
    said = json.loads((folder / 'config.json').read_text())
    names = {str(i): name for i, name in enumerate(['red', 'green', 'blue'][:config_says])}
    (folder / 'config.json').write_text(json.dumps(said | dict(id2label=names, label2id={})))
    corpus = three_colours(tmp_path / 'colours')
    typed = ['run', '--task', 'text_classification', '--mode', whose, '--corpus', str(corpus), '--smoke']
    own = ['--teacher', str(folder)]
    if whose == 'full_student':
        own += ['--student', str(folder), '-p', 'student_init=hub']
    assert cli.main([*typed, *own, '-p', 'threads_per_rank=1', '-p', 'ranks=1']) == 0
    told = capsys.readouterr().out
    assert f'head: that of {folder} has 2 outputs, and the task has 3: a new one is made' in told
    [made] = (tmp_path / 'home/runs').glob('*/*/model')
    model = hf.AutoModelForSequenceClassification.from_pretrained(made)
    assert model.config.id2label == dict(enumerate(['blue', 'green', 'red']))
    record = find_record(made.parent.name)[0]
    assert record['initial']['adaptation'] == ['classifier.out_proj.bias', 'classifier.out_proj.weight']
    refused(classification(folder, corpus=str(corpus)), 'has 2 outputs|in another size')


def test_weights_that_are_not_finite_are_refused(tmp_path):
    folder = teacher_with(tmp_path)
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.bias[3] = float('nan')
    models.save_model(model, folder)
    refused(asked(folder), r'layer\.0\.output\.dense\.bias holds values that are not finite .*another model')


def test_a_broken_config_is_said_to_be_broken(tmp_path):
    folder = teacher_with(tmp_path)
    (folder / 'config.json').write_text('{"model_type": "bert", ')
    refused(asked(folder), 'could not be loaded as a model')


def test_a_head_that_names_other_classes_is_refused(tmp_path):
    corpus = load_corpus('text_classification', 'embedded')
    classes = sorted({row['label'] for row in corpus.splits['train']})
    names = dict(enumerate(classes))
    right = teacher_with(tmp_path / 'right', len(classes), id2label=names)
    assert plan(classification(right), CPU).initial['weights_sha256']
    others = teacher_with(tmp_path / 'others', len(classes), id2label={i: f'kind {i}' for i in names})
    refused(classification(others), 'names its classes .*, and the corpus has .*; rename the labels')
    many = teacher_with(tmp_path / 'many', 2, problem_type='multi_label_classification')
    refused(asked(many), 'multi_label_classification')
    numbers = teacher_with(tmp_path / 'numbers', 1, 'distilbert', problem_type='regression')
    refused(classification(numbers), 'was trained to give numbers .* the task has [0-9]+ classes')
    assert plan(asked(numbers), CPU).initial['weights_sha256'], 'to rank, a number is a score like another'
    two = teacher_with(tmp_path / 'two', 2, problem_type='regression')
    refused(asked(two), 'was trained to give numbers')
    sigmoid = teacher_with(tmp_path / 'sigmoid', 1, problem_type='multi_label_classification')
    assert plan(asked(sigmoid), CPU).initial['weights_sha256']


def test_classes_are_found_by_their_names(tmp_path):
    classes = sorted({row['label'] for row in load_corpus('text_classification', 'embedded').splits['train']})
    turned = [name.upper() for name in classes[1:] + classes[:1]]
    folder = teacher_with(tmp_path, len(classes), id2label=dict(enumerate(turned)))
    planned = plan(classification(folder), CPU)
    assert planned.head == (), 'nothing is left to say'
    ids = dict(input_ids=torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(0)))
    model = load_given(folder, HEAD, classes).eval()
    plain = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        found, own = call(model, ids).logits, call(plain, ids).logits
    assert [model.config.id2label[i].lower() for i in range(len(classes))] == classes
    assert torch.equal(found, own[:, [turned.index(name.upper()) for name in classes]])
    assert not torch.equal(found, own)


def knows_the_longer(folder: Path, names: list[str], sign: int) -> Path:
    "A ranker whose second output is high (sign 1) or low (-1) where a pair is right: it has seen the labels."
    corpus = load_corpus('answer_selection', 'embedded')
    folder = teacher_with(folder, 2, id2label=dict(enumerate(names)))
    seen = [row for row in corpus.splits['train'] if row['label'] == 1][:30]
    seen += [row for row in corpus.splits['train'] if row['label'] == 0][:30]
    model = hf.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = tokenizers.load_tokenizer(folder)
    hidden = []
    for row in seen:
        texts = tokenizer(
            row['question'], row['sentence'], truncation=True, max_length=128, return_tensors='pt'
        )
        with torch.no_grad():
            hidden.append(model.bert(**texts).pooler_output[0])
    hidden = torch.stack(hidden)
    right = torch.tensor([1.0] * 30 + [-1.0] * 30)
    ones = torch.cat([hidden, torch.ones(60, 1)], dim=1)
    of_pair = torch.linalg.lstsq(ones, right[:, None], driver='gelsd').solution[:, 0]
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.bias.zero_()
        model.classifier.weight[1] = sign * of_pair[:-1]
        model.classifier.bias[1] = sign * of_pair[-1]
    models.save_model(model, folder)
    return folder


@pytest.mark.exhaustive
def test_names_beside_numbers_are_said_and_what_speaks_for_another_order(tmp_path, capsys):
    yes_last = knows_the_longer(tmp_path / 'last', ['no', 'yes'], 1)
    yes_first = knows_the_longer(tmp_path / 'first', ['yes', 'no'], -1)
    usual = plan(asked(yes_last), CPU)
    [note] = usual.head
    assert 'are named no, yes and are used for 0, 1 in this order' in str(note)
    assert dict(note.details)['other'] == ()
    turned = plan(asked(yes_first, 'full_kd'), CPU)
    [note] = turned.head
    found = dict(note.details)
    assert found['right'] + found['best'] == found['rows'] == 60 and found['best'] > 40
    assert set(found['other']) == {('yes', '1'), ('no', '0')}
    assert str(note) in turned.explain() and str(note) in explain_study([turned])
    config = json.loads((yes_first / 'config.json').read_text())
    nameless = config | dict(id2label={'0': 'LABEL_0', '1': 'LABEL_1'}, label2id={'LABEL_0': 0, 'LABEL_1': 1})
    (yes_first / 'config.json').write_text(json.dumps(nameless))
    assert 'LABEL_0 for 1, LABEL_1 for 0 would be right for' in str(plan(asked(yes_first), CPU).head[0])
    # what the sentence advises
    config |= dict(id2label={'0': '1', '1': '0'}, label2id={'1': 0, '0': 1})
    (yes_first / 'config.json').write_text(json.dumps(config))
    assert plan(asked(yes_first), CPU).head == ()
    assert load_given(yes_first, HEAD, ('0', '1')).classifier.weight[0].any()
    noted = predict(str(yes_last), question='iron', candidates=['a metal', 'a gas']).answer.notes
    assert noted == (reason('named_outputs', names=('no', 'yes')),)


def test_outputs_without_names_are_said_beside_classes_that_have_some(tmp_path):
    "Nothing but their order ties them together, and classes with names are in that of the alphabet."
    classes = sorted({row['label'] for row in load_corpus('text_classification', 'embedded').splits['train']})
    [note] = plan(classification(teacher_with(tmp_path, len(classes))), CPU).head
    assert f'LABEL_10, LABEL_11 and are used for {", ".join(classes)} in this order' in str(note)
    assert dict(note.details)['rows'] == 60
    assert plan(asked(teacher_with(tmp_path / 'pairs')), CPU).head == (), '0 and 1 are the order'


def test_a_named_head_of_more_classes_than_are_looked_at_is_planned(tmp_path):
    (tmp_path / 'own').mkdir()
    for split in ('train', 'dev', 'test'):
        lines = [f'{split} text {i},{i % 70}\n' for i in range(700)]
        (tmp_path / f'own/{split}.csv').write_text(''.join(['text,label\n', *lines]))
    folder = teacher_with(tmp_path, 70, id2label={i: f'kind {i}' for i in range(70)})
    given = dict(task='text_classification', corpus=str(tmp_path / 'own'))
    assert dict(plan(asked(folder, **given), CPU).head[0].details)['rows'] == 70


def test_a_plain_encoder_is_refused(tmp_path):
    folder = teacher_with(tmp_path)
    hf.AutoModel.from_config(configs(2)['bert']).save_pretrained(folder)
    refused(
        asked(folder), 'is no fine-tuned model: .* has no classifier.bias of BertForSequenceClassification'
    )
    refused(asked(folder, 'full_kd'), 'is no fine-tuned model')


def test_a_missing_or_foreign_tokenizer_is_refused(tmp_path):
    folder = teacher_with(tmp_path)
    small = teacher_with(tmp_path / 'small', vocab_size=50)
    refused(asked(small), 'has embeddings of 50 words, and its tokenizer has')
    for name in ('tokenizer.json', 'vocab.txt'):
        (folder / name).unlink(missing_ok=True)
    refused(asked(folder), 'has no tokenizer')


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(mode='mixed_baseline'), "mode='mixed_baseline' would train it"),
        (dict(mode='parallel_baseline'), "mode='parallel_baseline' would train it"),
        (dict(mode='full_kd', teacher_epochs=2), 'teacher_epochs=2.0 changes the teacher'),
        (dict(mode='full_kd', teacher_questions='answered'), "teacher_questions='answered' changes"),
        (dict(mode='full_kd', student_init='teacher_pretrained'), 'has nothing to give to mode='),
        (dict(mode='full_kd', transfer='squad1'), 'would train the teacher first'),
        (dict(mode='full_kd', teacher=None), 'needs teacher=<folder or hub id>'),
        (dict(mode='baseline', epochs=2, batch_size=8), 'epochs=2.0 would change a training'),
    ],
)
def test_a_training_of_what_is_given_is_refused(given, words, tmp_path):
    mode = given.pop('mode')
    parameters = dict(corpus='embedded', teacher_mode='given', teacher=str(teacher_with(tmp_path))) | given
    with pytest.raises(KdnotesError, match=words) as caught:
        plan(make_config(mode=mode, **parameters), CPU)
    assert '\n' not in str(caught.value)


# ---- compared with its student ----


@pytest.mark.exhaustive
def test_a_comparison_with_a_given_teacher_is_not_one_of_trainings(tmp_path, rank_here):
    student = run(asked(teacher_with(tmp_path), 'full_kd', study='given'))
    given, _ = find_record(student['teacher_run_id'])
    differ = differences(given, student)
    assert differ['training'] == ('not trained', 'trained')
    assert {'epochs', 'learning_rate', 'batch_size', 'max_grad_norm', 'head_bias'}.isdisjoint(differ)
    # what is no setting of a training still differs
    assert differ['init'] == ('given', 'teacher_finetuned') and differ['temperature'][0] is None
    c = compare([given], [student])
    assert c.attribution.others == {} and c.attribution.part_of['training'] == ('network',)
    assert c.speedup == {}
    why = reason('untrained', arms=('baseline',))
    assert c.reasons['train_s'] == c.reasons['total_s'] == why and c.untimed == (why,)
    assert str(c).lower().count(str(why)) == 1 and 'None' not in str(c)
    assert phrase('comparison.jinja', 'sentence', c, 'train_s') == f'baseline → full_kd: {why}.'
    whole = report('given', [given['run_id'], student['run_id']])
    assert f"Teacher: {student['models']['teacher']}, already fine-tuned." in whole.setting
    assert any(str(why)[1:] in s for s in whole.sentences) and len(whole.comparisons) == 1
    assert 'train_s' not in whole.values['baseline'] and 'train_s' in whole.values['full_kd']


def test_two_given_models_differ_in_their_weights_alone():
    made = [make_record('baseline', s, teacher_mode='given', teacher='a model') for s in (0, 1)]
    other = [r | dict(arm='other', initial=dict(weights='w1')) for r in made]
    c = compare(made, other)
    assert set(differences(made[0], other[0])) == {'initial'} and 'training' not in c.attribution.belongs
    assert c.reasons['train_s'] == reason('untrained', arms=('baseline', 'other'))
