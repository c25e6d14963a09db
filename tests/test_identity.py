"""What is computed is named by all that can change it: each file of a model is changed once, in every task
and for every kind of teacher, and nothing that was made before is used. (Of a corpus: test_large_corpora.py.)
"""

import json
import os
from pathlib import Path
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from architectures import small_bert
from kdnotes.core.config import KdnotesError, task_info
from kdnotes.core.spec import flat
from kdnotes.core.parse import make_config
from kdnotes.core.files import cache_path
from kdnotes.core.machine import Machine
from kdnotes.distill.models import load_given
from kdnotes.distill.tokenizers import load_tokenizer
from kdnotes.distill.teacher_cache import key_parts, signal_key
from kdnotes.experiment.launch import run
from kdnotes.experiment.compatibility import make_task
from kdnotes.experiment.plan import plan
from kdnotes.results.store import find_record
from kdnotes.tasks.sources import load_corpus
from kinds import one_of_each
from small_runs import write_corpus, write_model

ON = Machine('cpu', 2)
TASKS = ('answer_selection', 'text_classification', 'masked_lm', 'extractive_qa')
KINDS = ('given', 'fine-tuned', 'transferred', 'student from files')
SCORED = ('answer_selection', 'text_classification')  # tasks whose teachers may be several


def model_for(task: str, folder: Path) -> Path:
    "A small model with the head of a task, and all files that a model's folder may have."
    write_model(folder)
    tokenizer = load_tokenizer(folder)
    config = small_bert(len(tokenizer), max_position_embeddings=96, initializer_range=0.2)
    if task == 'text_classification':
        config.num_labels = len({row['label'] for row in load_corpus(task, 'embedded').splits['train']})
    torch.manual_seed(0)
    getattr(transformers, task_info(task).auto_class).from_config(config).save_pretrained(folder)
    (folder / 'special_tokens_map.json').write_text(json.dumps(dict(mask_token='[MASK]')))
    (folder / 'added_tokens.json').write_text('{}')
    return folder


# ---- what is changed ----


def said(name: str, **values):
    "Other values in a JSON file."

    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | values, indent=3))

    return change


def exchanged(folder: Path) -> None:
    "Two letters have each other's numbers."
    content = json.loads((folder / 'tokenizer.json').read_text())
    words = content['model']['vocab']
    words['a'], words['b'] = words['b'], words['a']
    (folder / 'tokenizer.json').write_text(json.dumps(content))


def exchanged_lines(folder: Path) -> None:
    lines = (folder / 'vocab.txt').read_text().split('\n')
    lines[5], lines[6] = lines[6], lines[5]
    (folder / 'vocab.txt').write_text('\n'.join(lines))


def other_weight(folder: Path) -> None:
    path = folder / 'model.safetensors'
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith('query.weight'))
    save_file(tensors | {name: tensors[name] * 2}, path, {'format': 'pt'})


def no_vocabulary(folder: Path) -> None:
    for path in [*folder.glob('tokenizer*'), *folder.glob('vocab*')]:
        path.unlink()


CHANGES = {
    'config.json: hidden_act': said('config.json', hidden_act='relu'),
    'config.json: layer_norm_eps': said('config.json', layer_norm_eps=0.1),
    'config.json: num_attention_heads': said('config.json', num_attention_heads=1),
    'config.json: id2label': said('config.json', id2label={'0': 'LABEL_1', '1': 'LABEL_0'}),
    'config.json: torn': lambda folder: (folder / 'config.json').write_text('{"model_type": "be'),
    'tokenizer.json: two words': exchanged,
    'tokenizer_config.json: do_lower_case': said('tokenizer_config.json', do_lower_case=False),
    'tokenizer.json and vocab.txt: gone': no_vocabulary,
    'tokenizer_config.json: truncation_side': said('tokenizer_config.json', truncation_side='left'),
    'tokenizer_config.json: mask_token': said('tokenizer_config.json', mask_token='[UNK]'),
    'vocab.txt: two words': exchanged_lines,
    'special_tokens_map.json': said('special_tokens_map.json', mask_token='[UNK]'),
    'added_tokens.json': said('added_tokens.json', iron=57),
    'model.safetensors: a weight': other_weight,
    'model.safetensors: torn': lambda folder: os.truncate(folder / 'model.safetensors', 1000),
}
SAME = {
    'where and with what it was written': said(
        'config.json', _name_or_path='/elsewhere', transformers_version='1.0', torch_dtype='bfloat16'
    ),
    'the same of the tokenizer': said('tokenizer_config.json', name_or_path='/elsewhere', is_local=True),
    'a card': lambda folder: (folder / 'README.md').write_text('a model'),
}


# ---- who is asked ----


def asked(task: str, kind: str, place: Path, mode: str = 'full_kd'):
    "A student whose model of files, of this kind, is in a folder that changes."
    changing = str(place / 'model')
    given = dict(task=task, corpus='embedded', max_length=80, smoke=True, threads_per_rank=1, ranks=1)
    if task == 'extractive_qa':
        given['stride'] = 16
    own = {
        'given': dict(mode=mode, teacher=changing, teacher_mode='given', student_layers=(1,)),
        'fine-tuned': dict(mode=mode, teacher=changing, student_layers=(1,)),
        'transferred': dict(
            mode=mode,
            teacher=changing,
            transfer=str(place / 'first'),
            student_init='transferred',
            student_layers=(1,),
        ),
        'student from files': dict(
            mode=mode, teacher=str(place / 'teacher'), student_init='hub', student=changing
        ),
        'the second of two': dict(
            mode=mode,
            teacher=str(place / 'teacher'),
            teachers=f'{place / "teacher"},{changing}',
            student_init='teacher_pretrained',
            student_layers=(1,),
        ),
    }[kind]
    return make_config(**given | own)


def first_corpus(task: str, folder: Path) -> None:
    "A corpus that is learnt first: some rows of the embedded one."
    if task == 'answer_selection':
        write_corpus(folder)
        return
    folder.mkdir()
    for split, rows in load_corpus(task, 'embedded').splits.items():
        if task == 'masked_lm':
            (folder / f'{split}.txt').write_text('\n\n'.join(row['text'] for row in rows[:3]))
        else:
            few = [_as_given(task, row) for row in rows[1:]]
            (folder / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, few)))


def _as_given(task: str, row: dict) -> dict:
    "A row as a user has it."
    if task == 'text_classification':
        return {key: row[key] for key in ('text', 'label')}
    spans = row['answers']
    texts = [row['context'][begin:end] for begin, end in spans]
    answers = dict(text=texts, answer_start=[begin for begin, _ in spans])
    return {key: row[key] for key in ('id', 'question', 'context')} | dict(answers=answers)


def names(config, corpora: dict) -> tuple[str, ...]:
    "The names of a run and of all that it stands on, the run itself first."
    found = []
    waiting = [plan(config, ON, corpora)]
    while waiting:
        p = waiting.pop(0)
        found.append(p.run_id)
        waiting += [first for first in (p.teacher, p.transfer) if first]
    return tuple(found)


def becomes(config, corpora: dict, before: tuple[str, ...]) -> str:
    "What a change does to a run: 'refused', 'made anew', or 'used'."
    try:
        after = names(config, corpora)
    except KdnotesError:
        return 'refused'
    # the student, and for all kinds but one what it learns from
    changed = [one != other for one, other in zip(before, after, strict=True)]
    teachers = changed[1:] if config.model.student.init != 'hub' else []
    return 'made anew' if changed[0] and all(teachers) else 'used'


def table_of(task: str, kind: str, place: Path) -> dict[str, str]:
    "Change -> what becomes of the runs of a kind of teacher; the folder is put back after each."
    folder = model_for(task, place / 'model')
    if kind in ('student from files', 'the second of two'):
        model_for(task, place / 'teacher')
    if kind == 'transferred':
        first_corpus(task, place / 'first')
    config = asked(task, kind, place)
    corpora: dict = {}
    before = names(config, corpora)
    kept = {path: path.read_bytes() for path in folder.iterdir()}
    found = {}
    for name, change in (CHANGES | SAME).items():
        change(folder)
        found[name] = becomes(config, corpora, before)
        for path in folder.iterdir():
            if path not in kept:
                path.unlink()
        for path, content in kept.items():
            path.write_bytes(content)
    assert names(config, corpora) == before, 'put back, it is what it was'
    return found


# each task and each kind once
CASES = sorted(
    ((task, kind) for task in TASKS for kind in KINDS),
    key=lambda of: TASKS.index(of[0]) != KINDS.index(of[1]),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize('task, kind', one_of_each(CASES, lambda case: case[1] == 'student from files'))
def test_no_changed_file_is_read_under_the_old_name(task, kind, home):
    found = table_of(task, kind, home)
    # the tokenizer is the teacher's: a student from files is read by another's
    texts = ('token', 'vocab', 'special', 'added')
    unread = {name for name in CHANGES if kind == 'student from files' and name.startswith(texts)}
    assert {name for name in CHANGES.keys() - unread if found[name] == 'used'} == set()
    assert {found[name] for name in SAME} == {'used'}
    assert all(found[name] == 'refused' for name in found if name.endswith(('torn', 'gone')))


# what is read with another model's tokenizer, and would be read with its own in another way
OTHERWISE = {
    'tokenizer.json: two words': 'has another vocabulary',
    'tokenizer_config.json: do_lower_case': 'changes or cuts texts in another way',
}


@pytest.mark.exhaustive
@pytest.mark.parametrize('task', one_of_each(SCORED))
def test_no_changed_file_of_the_second_of_several_teachers_is_read_under_the_old_name(task, home):
    found = table_of(task, 'the second of two', home)
    texts = ('token', 'vocab', 'special', 'added')  # made by the first one's tokenizer
    assert {name for name in CHANGES if found[name] == 'used' and not name.startswith(texts)} == set()
    assert {name for name in OTHERWISE if found[name] != 'refused'} == set()
    assert {found[name] for name in SAME} == {'used'}
    for name, words in OTHERWISE.items():
        folder = model_for(task, home / name[:12] / 'model')
        model_for(task, home / name[:12] / 'teacher')
        CHANGES[name](folder)
        with pytest.raises(KdnotesError, match=words):
            plan(asked(task, 'the second of two', folder.parent), ON)


@pytest.mark.exhaustive
def test_a_student_of_several_teachers_is_made_anew_when_the_second_computes_otherwise(home, rank_here):
    folder = model_for('answer_selection', home / 'model')
    model_for('answer_selection', home / 'teacher')
    given = flat(asked('answer_selection', 'the second of two', home), changed=True)
    given |= dict(corpus=str(write_corpus(home / 'corpus')), max_length=64)
    first = run(make_config(**given))
    said('config.json', hidden_act='relu')(folder)
    other = run(make_config(**given))
    assert first['run_id'] != other['run_id'] and first['model_sha256'] != other['model_sha256']
    its_plan = plan(make_config(**given))
    assert its_plan.teachers['sha256'] == other['teachers']['sha256'] != first['teachers']['sha256']


def kept_names(place: Path, corpus) -> tuple[str, set[str]]:
    "The name of a teacher's outputs, and those of the tokens."
    config = plan(asked('answer_selection', 'given', place), ON, {'embedded': corpus}).config
    task = make_task(config, corpus)
    tokenizer = load_tokenizer(config.model.pretrained)
    teacher = load_given(config.model.pretrained, task.auto_class, task.head_labels)
    task.encode(tokenizer, place / 'tokens')
    tokens = {path.name for path in (place / 'tokens').glob('*.tokens')}
    return signal_key(**key_parts(task, config, teacher, tokenizer, corpus.sha256)), tokens


@pytest.mark.parametrize(
    'name, signal, tokens',
    [
        ('config.json: hidden_act', True, False),
        ('config.json: id2label', True, False),
        ('tokenizer.json: two words', True, True),
        ('tokenizer_config.json: truncation_side', True, True),
        ('special_tokens_map.json', True, False),
        ('model.safetensors: a weight', True, False),
        ('where and with what it was written', False, False),
        ('the same of the tokenizer', False, False),
    ],
)
def test_outputs_and_tokens_are_named_by_what_they_are_made_of(name, signal, tokens, home):
    folder = model_for('answer_selection', home / 'model')
    corpus = load_corpus('answer_selection', 'embedded')
    before, first = kept_names(home, corpus)
    (CHANGES | SAME)[name](folder)
    after, second = kept_names(home, corpus)
    assert (after != before, second > first) == (signal, tokens)


def test_the_projects_own_weights_have_no_second_name_and_all_others_have(home):
    model_for('answer_selection', home / 'model')
    config = asked('answer_selection', 'fine-tuned', home)
    assert plan(config, ON).teacher.initial.keys() == {'weights_sha256', 'reading_sha256'}
    pinned = plan(make_config(mode='baseline', corpus='embedded', smoke=True), ON)
    assert pinned.initial.keys() == {'weights_sha256'} and len(pinned.reading_sha256) == 64


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_given_teacher_that_computes_otherwise_is_measured_and_asked_anew(home):
    folder = write_model(home / 'model')
    given = dict(corpus=str(write_corpus(home / 'corpus')), teacher=str(folder), teacher_mode='given')
    given |= dict(max_length=64, smoke=True, student_layers=(1,), threads_per_rank=1, ranks=1)
    first = run(make_config(mode='full_kd', **given))
    config = (folder / 'config.json').read_text()
    said('config.json', hidden_act='relu')(folder)
    other = run(make_config(mode='full_kd', **given))
    teachers = [find_record(student['teacher_run_id'])[0] for student in (first, other)]
    assert teachers[0]['model_sha256'] == teachers[1]['model_sha256'], 'the same weights'
    assert teachers[0]['metrics'] != teachers[1]['metrics']
    assert first['model_sha256'] != other['model_sha256']
    signals = [path for path in (cache_path() / 'signals').iterdir() if path.is_dir()]
    assert len(signals) == 2
    # put back, the first is found again, also by another student
    (folder / 'config.json').write_text(config)
    assert plan(make_config(mode='full_kd', **given)).run_id == first['run_id']
    again = plan(make_config(mode='full_kd', alpha=0.3, **given))
    assert again.teacher.run_id == first['teacher_run_id']
    for record in teachers:
        assert record['models']['reading_sha256'] == record['initial']['reading_sha256']
