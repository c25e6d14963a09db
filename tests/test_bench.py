"""The benchmark compares equals: every contestant computes the same loss, the same gradients and,
from the same examples, the same trained weights; and a contestant that fails is named and skipped.
"""

import copy
import json
import math
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import BertForSequenceClassification
from architectures import small_bert
from helpers import as_configured, flat, tiny_config
from letters import of_words
from notebooks import last_line, papermill
from tiny_lm import WORDS, tiny_lm, tiny_tokenizer as tiny_tokenizer_of_words
from bench import baselines, race as bench, contestants, turns
from bench.profiling import listening
from kdnotes.tasks.answer_selection import AnswerSelection
from kdnotes.core.arms import MODES
from kdnotes.core.config import ConfigError
from kdnotes.core.parse import make_config
from kdnotes.core.machine import Machine
from kdnotes.core.resolve import resolve
from kdnotes.tasks.base import SignalSpec, TaskView
from kdnotes.tasks.sources import load_corpus
from kdnotes.distill.models import save_model
from kdnotes.distill.students import choose_layers
from kdnotes.train.distributed import Runtime
from bench.results import (
    formats_line,
    headline,
    inference,
    quality,
    ratios,
    rounds,
    shares,
    table,
    text,
    time_split,
)
from kdnotes.distill.teacher_cache import online_signal
from kdnotes.train.loop import Objective, accumulate, loss_weights, schedule_steps, train
from kdnotes.core.spec import value_of

pytestmark = pytest.mark.filterwarnings('ignore')  # other people's libraries warn as they like
CPU = Runtime(torch.device('cpu'), 'fp32', threads=1)
LIBRARIES = {
    'hf_default': ('huggingface', {}, False),
    'hf_grouped': ('huggingface', dict(grouped=True), False),
    'hf_best': ('huggingface', dict(grouped=True), True),
    'sentence_transformers': ('sentence_transformers', {}, True),
    'textbrewer': ('textbrewer', {}, False),
}  # name -> library, options, are the teacher's logits in its rows?


def tiny_tokenizer(rows):
    "A whole word is a token."
    texts = sorted({w for r in rows for text in (r['question'], r['sentence']) for w in text.split()})
    special = ('[PAD]', '[UNK]', '[CLS]', '[SEP]')
    inputs = ('input_ids', 'token_type_ids', 'attention_mask')  # as BERT's own
    return of_words(texts, special, inputs)


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
    "A task, a sure teacher of two layers, its first layer as the student's start, and their folders."
    folder = tmp_path_factory.mktemp('tiny')
    task = AnswerSelection(load_corpus('answer_selection', 'embedded'), smoke=True)
    tokenizer = tiny_tokenizer([r for rows in task.rows.values() for r in rows])
    task.encode(tokenizer)
    torch.manual_seed(0)
    teacher = BertForSequenceClassification(small_bert(len(tokenizer), max_position_embeddings=128)).eval()
    with torch.no_grad():
        teacher.classifier.weight *= 5
    student = choose_layers(teacher, (0,))
    for name, model in dict(teacher=teacher, student=student).items():
        save_model(model, folder / name, tokenizer)
    return dict(task=task, tokenizer=tokenizer, teacher=teacher, student=student, folder=folder)


def course(tiny, config, steps, stored, folder, runtime):
    "What a library gets; the folder is its own."
    task = tiny['task']
    teacher = tiny['teacher']
    everyone = task.batch('train', np.arange(len(task.lengths('train'))))
    rows = baselines.examples(
        task, online_signal(task, teacher)(everyone)['logits'].numpy() if stored else None
    )
    (folder / 'student').symlink_to(tiny['folder'] / 'student')
    return baselines.Course(
        student=copy.deepcopy(tiny['student']),
        teacher=None if stored else teacher,
        rows=rows,
        tokenizer=tiny['tokenizer'],
        config=config,
        runtime=runtime,
        steps=steps,
        folder=folder,
    )


def training_of(name, tiny, config, steps, folder, runtime=CPU):
    "A library's training, or a skip."
    library, options, stored = LIBRARIES[name]
    if why := baselines.missing(library):
        pytest.skip(why)
    return getattr(baselines, library)(course(tiny, config, steps, stored, folder, runtime), **options)


@pytest.mark.parametrize('name', LIBRARIES)
def test_a_library_has_our_loss_and_our_gradients(name, tiny, tmp_path):
    config = tiny_config('full_kd', alpha=0.3, temperature=3.0)
    task = tiny['task']
    index = np.arange(3, 11)
    as_configured(task, config)
    ours = copy.deepcopy(tiny['student']).train()
    signal = online_signal(task, tiny['teacher'])
    objective = Objective(task, config, CPU, loss_weights(task, config), signal)
    losses, *_ = accumulate(ours, objective, CPU.scaler(), index)
    training = training_of(name, tiny, config, 5, tmp_path)
    known = online_signal(task, tiny['teacher'])(task.batch('train', index))['logits']
    rows = [baselines.examples(task)[i] for i in index]
    batch = dict(tiny['tokenizer'].pad(rows, return_tensors='pt'))
    if LIBRARIES[name][2]:
        batch |= dict(teacher_logits=known)
    training.model.train()
    loss = training.loss(batch)
    loss.backward()
    if name == 'textbrewer':  # a cross-entropy: higher by the entropy of the teacher's distribution
        p = (known / config.loss.temperature).softmax(-1)
        loss = loss - config.loss.alpha * config.loss.temperature**2 * -(p * p.log()).sum(-1).mean()
    assert loss.item() == pytest.approx(losses['total'].item(), abs=2e-6)
    theirs = [p.grad for p in training.model.parameters()]
    np.testing.assert_allclose(flat(theirs), flat([p.grad for p in ours.parameters()]), atol=1e-6)


@pytest.mark.parametrize(
    'labels, why',
    [
        (torch.tensor([0.5]), 'are numbers here'),
        (torch.tensor([[0, 1, -100]]), 'has 3 labels for its first example'),
    ],
)
def test_a_task_without_one_class_an_example_is_refused_in_a_sentence(tiny, labels, why):
    task = tiny['task']
    other = TaskView(task, batch=lambda *given: replace(task.batch(*given), labels=labels))
    with pytest.raises(baselines.BaselineError, match=why) as refused:
        baselines.examples(other)
    assert all(
        part in str(refused.value) for part in ("task='answer_selection'", 'name contestants of kdnotes')
    )


def test_the_stored_logits_are_found_under_any_name(tiny):
    logits = SignalSpec((2,))
    words = dict(words=SignalSpec((4,), ragged=True), best=SignalSpec((1,), integer=True))
    assert baselines.logits_name(tiny['task']) == 'logits'
    assert baselines.logits_name(TaskView(tiny['task'], signal_spec=words | dict(said=logits))) == 'said'
    for spec in (words, dict(start=logits, end=logits)):
        with pytest.raises(baselines.BaselineError, match='answer_selection.* not one row of logits'):
            baselines.logits_name(TaskView(tiny['task'], signal_spec=spec))


@pytest.mark.parametrize('name', LIBRARIES)
def test_three_steps_over_all_examples_give_everyone_the_same_weights(name, tiny, tmp_path):
    # with every example in each step the order is no matter: what is left are optimizer, decay, schedule,
    # clipping and loss
    task = tiny['task']
    n = len(tiny['task'].lengths('train'))
    config = tiny_config(
        'full_kd',
        batch_size=n,
        epochs=3,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_fraction=0.0,
        max_grad_norm=0.5,
        micro_batch_tokens=10**6,
    )
    as_configured(task, config)
    ours = copy.deepcopy(tiny['student'])
    result = train(task, ours, config, CPU, lambda kind, **values: None, online_signal(task, tiny['teacher']))
    training = training_of(name, tiny, config, 3, tmp_path)
    probe = baselines.Probe(CPU, steps=3, warmup=1)
    with listening(training.model, probe):
        training.run()
    found = probe.result()
    assert (found['examples'], found['tokens']) == (2 * n, 2 * int(task.lengths('train').sum())) and found[
        'cells'
    ] == 2 * n * task.lengths('train').max()
    start = parameters_to_vector(tiny['student'].parameters())
    end = parameters_to_vector(ours.parameters())
    theirs = parameters_to_vector(training.model.parameters())
    assert (end - start).norm() > 0.5 and (theirs - end).norm() < 2e-3 * (end - start).norm()
    if name != 'textbrewer':
        np.testing.assert_allclose(
            [float(x) for x in training.losses], [p['loss'] for p in result.curve if 'loss' in p], atol=1e-4
        )


@pytest.mark.parametrize('name', LIBRARIES)
def test_dropout_and_16_bits_are_on_and_the_teacher_is_asked_without_dropout(name, tiny, tmp_path):
    training = training_of(
        name,
        tiny,
        tiny_config('mixed_kd', warmup_fraction=0.0),
        1,
        tmp_path,
        Runtime(torch.device('cpu'), 'bf16', threads=1),
    )
    dropout, formats, hooks = dict(student=[], teacher=[]), dict(student=[], teacher=[]), []
    for of, model in dict(student=training.model, teacher=tiny['teacher']).items():
        for m in model.modules():
            if isinstance(m, torch.nn.Dropout):
                hooks.append(m.register_forward_hook(lambda m, *_, of=of: dropout[of].append(m.training)))
            if isinstance(m, torch.nn.Linear):
                hooks.append(m.register_forward_hook(lambda m, _, out, of=of: formats[of].append(out.dtype)))
    try:
        training.run()
    finally:
        for hook in hooks:
            hook.remove()
    asked = not LIBRARIES[name][2]
    assert set(dropout['student']) == {True} and set(dropout['teacher']) == ({False} if asked else set())
    assert set(formats['student']) == {torch.bfloat16} and set(formats['teacher']) == (
        {torch.bfloat16} if asked else set()
    )
    assert {p.dtype for p in training.model.parameters()} == {torch.float32}


def test_every_contestant_takes_what_it_has_of_the_options_of_a_race(tiny, tmp_path):
    "A student of chosen layers of a given teacher: contestants without a student leave the layers out."
    common = dict(smoke=True, teacher=str(tiny['folder'] / 'teacher'), student_layers=(0,))
    race = contestants.RaceSetting(tmp_path, common, 'auto', 6, 'embedded')
    assert bench._raced_task(common) == 'answer_selection'
    prepares = contestants.Contestant('prepare', '', 'mixed_baseline')
    for name, c in [*contestants.RACE.items(), ('prepare', prepares)]:
        config = contestants.contestant_job(c, race)['config']
        assert config['teacher'] == common['teacher'], name
        assert config.get('student_layers') == ([0] if MODES[c.mode].network == 'student' else None), name


def test_long_steps_have_the_mean_length(tiny):
    class Long:
        def groups(self, split):
            return np.arange(4096)

        def lengths(self, split):
            return np.random.default_rng(0).gamma(4, 10, 4096).astype(int)

    config = tiny_config('full_kd', batch_size=256, epochs=1)
    means = {}
    for blocks, task in {False: Long(), True: turns.in_blocks(Long())}.items():
        steps = [s.index for s in schedule_steps(task, config)[1]]
        assert sorted(np.concatenate(steps)) == list(range(4096))
        means[blocks] = np.std([task.lengths('train')[i].mean() for i in steps])
    assert means[True] < 0.2 * means[False]


# ---- processes ----


@pytest.fixture
def home(tmp_path, monkeypatch):
    "Runs go there; one core is seen, so that a busy machine does not make threads wait for each other."
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path))
    for module in (bench, contestants):
        monkeypatch.setattr(module, 'machine', lambda: Machine('cpu', 1))
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    return tmp_path


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_small_race(home, tiny):
    "Rates, trained students and answers, in one benchmark."
    race = ['machine', 'teacher', 'teacher_bf16', 'kdnotes', 'kdnotes_as_run', 'student_alone', 'hf_best']
    lines = []
    results = bench.bench(
        'embedded',
        alternations=2,
        contestants=','.join([*race, 'quality', 'inference']),
        smoke=True,
        say=lines.append,
        teacher=str(tiny['folder'] / 'teacher'),
        student_layers=(0,),
    )
    chosen = contestants.choose(','.join([*race, 'quality', 'inference']))
    absent = {name for name, c in chosen.items() if baselines.missing(c.by)}
    assert set(results['missing']) == absent, results['missing']
    order = [name for name in race if name not in absent]
    here = order[6:]
    turns = [(t['contestant'], t['turn']) for t in results['turns'] if not t['split']]
    there_and_back = [*((name, 0) for name in order), *((name, 1) for name in reversed(order))]
    assert turns[: 2 * len(order)] == there_and_back
    (saved,) = (home / 'runs' / 'bench').glob('*/bench.json')
    assert json.loads(saved.read_text()) == json.loads(json.dumps(results))
    # nothing of the user's runs stays, and no run of the usual home was made
    assert [p.name for p in (home / 'runs').iterdir() if p.name != '.cache'] == ['bench']
    assert not list(saved.parent.rglob('record.json'))
    formats = results['formats']
    assert set(formats) == {'kdnotes'} | {'huggingface' for _ in here}
    for library, found in formats.items():
        assert set(found['rates']) == {'fp32', 'bf16'} and library in formats_line(results)
        assert found['dtype'] == max(found['rates'], key=found['rates'].get)
    shown = table(results)
    cold = ['kdnotes_cold', 'kdnotes_cold_bf16']
    assert list(shown.index) == [*order[1:4], *cold, *order[4:]]
    assert list(shown['format'][order[1:3]]) == ['fp32', 'bf16']
    assert set(shown['format'][['kdnotes', 'kdnotes_as_run']]) == {formats['kdnotes']['dtype']}
    assert (shown[['examples_per_s', 'of_large_percent']] > 0).all(axis=None)
    assert shown.host_mib.drop(cold).gt(50).all()
    assert rounds(results, 'kdnotes_cold').lt(rounds(results, 'kdnotes')).all()
    run = next(t for t in results['turns'] if t['contestant'] == 'kdnotes_as_run')
    losses = [t['losses'] for t in results['turns'] if t['contestant'] == 'kdnotes']
    for of in (run['losses'], *losses):
        assert [step for step, _ in of] == list(range(1, 7)) and all(math.isfinite(loss) for _, loss in of)
    assert losses[0] != losses[1] and run['ranks'] >= 1
    assert set(shares(results).columns) == {'kdnotes', *here} and (shares(results).loc['products'] > 0).all()
    split = time_split(results)
    assert split.loc['teacher', 'student_alone'] == 0 < split.loc['teacher', 'kdnotes']
    for parts in (split, shares(results)):
        assert parts.sum().round(6).eq(100).all()
    scores = quality(results)
    assert set(scores.seeds) == {2} and scores['mean'].between(0, 1).all()
    asked = inference(results)
    assert (asked.texts_per_s > 0).all() and asked.of_predict["kdnotes' predict, the teacher"] == 1.0
    said = text(results).splitlines()
    assert said[0].startswith('formats, the faster one in a trial') and said[-1] == ratios(results)
    assert said[-1].startswith('ratios: hf_best ' if here else 'ratios: none')
    assert any('round 2 of 2: kdnotes ' in line for line in lines)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_contestant_that_fails_is_skipped_and_the_others_go_on(home, tiny):
    common = dict(smoke=True, teacher=str(tiny['folder'] / 'teacher'), student_layers=(0,))
    race = contestants.RaceSetting(home, common, 'bf16', 6, 'embedded')
    bench.prepare_race(race, True, lambda line: None)
    job = contestants.contestant_job(contestants.RACE['kdnotes'], race)
    jobs = dict(
        broken=job | dict(trains='nobody'),
        late=job | dict(limit_s=0.01),
        short=job | dict(steps=2),
        kdnotes=job | dict(split=False, shares=False),
    )
    lines = []
    heat = bench.Heat(jobs, 2, 20.0, lines.append).run()
    failed = heat.failed
    assert [(t['contestant'], t['turn']) for t in heat.turns] == [('kdnotes', 0), ('kdnotes', 1)]
    assert (
        set(failed) == {'broken', 'late', 'short'}
        and 'did not answer within 0.01 s' in failed['late']
        and "KeyError: 'nobody'" in failed['broken']
        and 'steps=10' in failed['short']
        and set(failed.values()) <= set(lines)
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_and_two_apart(home, tiny):
    common = dict(smoke=True, teacher=str(tiny['folder'] / 'teacher'), student_layers=(0,))
    race = contestants.RaceSetting(home, common, 'bf16', 48, 'embedded')
    bench.prepare_race(race, True, lambda line: None)
    jobs = {
        name: contestants.contestant_job(contestants.ACCUMULATED[name], race, 20.0)
        for name in ('2x1_accumulated', '2_apart')
    }
    assert {name: job['config']['batch_size'] for name, job in jobs.items()} == {
        '2x1_accumulated': 512,
        '2_apart': 256,
    }
    heat = bench.Heat(jobs, 1, 20.0, lambda line: None).run()
    turns = heat.turns
    assert not heat.failed and [(t['contestant'], t['split']) for t in turns] == [
        ('2x1_accumulated', False),
        ('2_apart', False),
        ('2x1_accumulated', True),
    ]
    assert turns[-1]['parts']['waiting'] > 0


def test_what_cannot_be_run_is_refused_before_anything_starts(home):
    with pytest.raises(contestants.BenchError, match="names 'nobody'"):
        bench.bench(contestants='kdnotes,nobody')
    with pytest.raises(ConfigError, match='hundreds of times slower'):
        bench.bench('embedded', dtype='fp16', contestants='kdnotes', smoke=True)
    assert not (home / 'runs').exists()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_the_notebook_ends_in_the_ratios(tmp_path):
    (tmp_path / 'runs').mkdir()
    done = papermill(
        tmp_path,
        'nbs/bench.ipynb',
        tmp_path / 'bench.ipynb',
        ('corpus', 'embedded'),
        ('contestants', 'kdnotes,hf_best'),
        ('alternations', 1),
        ('smoke', True),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    cells = [c for c in json.loads((tmp_path / 'bench.ipynb').read_text())['cells'] if c.get('outputs')]
    said = [''.join(o['text']) for o in cells[-1]['outputs'] if o['output_type'] == 'stream']
    saved = (tmp_path / 'runs' / 'bench' / 'table.txt').read_text()
    assert last_line(''.join(said)) == last_line(saved) and last_line(saved).startswith('ratios: ')
    assert ('hf_best' in last_line(saved)) == (
        not baselines.missing('huggingface')
    ) or 'hf_best is skipped' in saved


def test_who_scores_a_text_finds_the_same(tmp_path):
    "In batches of many sentences, a sentence at a time and a masked copy at a time."
    tiny_lm(closed=True).save_pretrained(tmp_path)
    tiny_tokenizer_of_words().save_pretrained(tmp_path)
    rng = np.random.default_rng(0)
    rows = [
        dict(question=' '.join(f'w{k}' for k in rng.integers(WORDS, size=n)), sentence=f'w{n} w1 w2')
        for n in rng.integers(2, 12, size=30)
    ]
    place = SimpleNamespace(
        config=make_config(teacher=str(tmp_path), max_length=16),
        corpus=SimpleNamespace(splits=dict(train=rows)),
        tokenizer=tiny_tokenizer_of_words(),
        runtime=CPU,
        total=10,
        warmup=3,
    )
    found = [turns.time_scores(place, 1, by) for by in ('kdnotes', 'sentence', 'copy')]
    assert found[0]['nll'] > 1
    for other in found[1:]:
        assert other['nll'] == pytest.approx(found[0]['nll'], abs=1e-4)
    assert turns.time_scores(place, 2)['nll'] != found[0]['nll']


def test_each_library_races_in_its_faster_format():
    race = contestants.RaceSetting('/somewhere', {}, 'auto', 55, 'embedded')
    formats = dict(
        huggingface=bench.faster(dict(fp32=59.0, bf16=5.0)), kdnotes=bench.faster(dict(fp32=57.0, bf16=119.0))
    )
    dtypes = {
        name: bench.in_format(c, race, formats).dtype
        for name, c in contestants.choose('race,quality,hf_default_trained').items()
    }
    theirs = {name: dtypes[name] for name in dtypes if name.startswith('hf_')}
    assert set(theirs.values()) == {'fp32'} and len(theirs) == 6
    assert {dtypes[name] for name in ('kdnotes', 'kdnotes_as_run', 'kdnotes_trained')} == {'bf16'}
    forced = replace(race, dtype='fp32')
    assert bench.in_format(contestants.RACE['kdnotes'], forced, formats).dtype == 'fp32'
    job = contestants.contestant_job(contestants.RACE['hf_best'], replace(race, dtype='fp32'))
    assert (job['dtype'], job['config']['mode']) == ('fp32', 'full_kd')


def test_a_users_run_has_the_ranks_and_threads_of_a_plain_run():
    race = contestants.RaceSetting('/somewhere', {}, 'bf16', 55, 'embedded')
    job = contestants.contestant_job(contestants.RACE['kdnotes_as_run'], race)
    plain = resolve(make_config(mode='mixed_kd', corpus='embedded'), contestants.machine(), 'embedded')
    assert job['ranks'] == 1  # a process that starts the run's own
    for name in ('ranks', 'threads_per_rank'):
        assert name not in job['asked']
        assert job['config'][name] == value_of(plain, name)


@pytest.mark.parametrize('model', ['teacher', 'student'])
def test_who_is_asked_says_the_same(tiny, model):
    "kdnotes' predict, a pipeline and a CrossEncoder, about the same texts."
    place = SimpleNamespace(
        config=make_config(smoke=True),
        corpus=load_corpus('answer_selection', 'embedded'),
        folder=tiny['folder'],
        runtime=CPU,
    )
    found = {}
    for library in ('kdnotes', 'transformers', 'sentence_transformers'):
        if baselines.missing(library):
            continue
        here = SimpleNamespace(**vars(place), job=dict(library=library))
        found[library] = turns.time_answers(here, 1, model)
        assert min(found[library][f'latency_{n}_ms'] for n in (1, 32)) > 0
        assert found[library]['texts_per_s'] > 0
    assert 0.01 < found['kdnotes']['likely'] < 0.99
    for other in found.values():
        assert other['likely'] == pytest.approx(found['kdnotes']['likely'], abs=1e-4)


def made_turn(name, rate, **more):
    "A turn of results that are made up."
    return dict(contestant=name, turn=0, split=False, examples_per_s=rate, padding_share=0.0) | more


def test_the_rest_of_the_lead_is_counted_in_operations():
    facts = dict(
        training_flops_per_example=3.0, executed_flops_per_example=2.0, teacher_flops_per_example=1.5
    )
    turns = [
        made_turn('kdnotes', 300.0),
        made_turn('hf_best', 150.0, padding_share=0.2),
        made_turn('hf_default', 50.0, padding_share=0.6),
        made_turn('teacher', 100.0),
        made_turn('teacher_bf16', 200.0),
    ]
    results = dict(turns=turns, facts=facts, settings=dict(dtype='bf16'))
    own, rest = headline(results)
    assert 'kdnotes is 2.00x' in own and 'hf_best does 1.88x the operations' in own  # 3 / .8 against 2
    assert '1.00x (1.00 to 1.00) cold with a signal in fp32' in own
    assert '1.33x (1.33 to 1.33) cold with a signal in bf16' in own
    # (3 + 1.5) / .4 against 3 / .8
    assert 'the teacher in each step is 1.50x' in rest and '2.00x, together 3.00x' in rest


@pytest.mark.parametrize('deadline, turns', [(math.inf, [1, 1, 2, 2, 3]), (0.0, [])])
def test_the_first_round_on_a_gpu_is_left_out_and_no_turn_begins_too_late(deadline, turns):
    answer = dict(examples_per_s=1.0, tokens_per_s=20.0, host_mib=1.0, device_mib=None)
    crew = SimpleNamespace(ask=lambda *_: [answer], close=lambda: None)
    jobs = {name: dict(copies=1, split=name == 'kdnotes', shares=False) for name in ('kdnotes', 'hf_best')}
    said = []
    heat = bench.Heat(jobs, 2, 20.0, said.append, lambda name, job: crew, warm=1, deadline=deadline).run()
    assert [t['turn'] for t in heat.turns] == turns and heat.rounds == len(turns) // 2
    assert [t['contestant'] for t in heat.turns if t['split']] == ['kdnotes'] * bool(turns)
    assert said[-1].startswith('round 2 of 2: ' if turns else '0 of 2 rounds were made whole')


def test_a_race_of_what_cannot_be_kept_is_refused():
    with pytest.raises(contestants.BenchError, match='task=masked_lm hides other words in each epoch'):
        bench.bench(task='masked_lm', corpus='embedded', smoke=True)
