"""What is computed is named by all that can change it: each file of a model and of a corpus is changed once, in
every task and for every kind of teacher, and nothing that was made before is used."""

import json
import os
from pathlib import Path
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from architectures import small_bert
from kdnotes.core.config import KdnotesError, make_config, task_info
from kdnotes.core.files import cache_path
from kdnotes.core.resolve import Machine
from kdnotes.distill.models import MINILM, find_model, is_pinned, load_given, load_tokenizer
from kdnotes.distill.models import reading_sha256, source_sha256
from kdnotes.distill.teacher_cache import key_parts
from kdnotes.experiment.launch import RunError, make_runs, run
from kdnotes.experiment.plan import make_task, plan
from kdnotes.records.store import RunFolder, find_record
from kdnotes.tasks.batching import tokenizer_rules
from kdnotes.tasks.sources import load_corpus
from test_doctor import write_corpus, write_model

ON = Machine('cpu', 2)
TASKS = ('answer_selection', 'text_classification', 'masked_lm', 'extractive_qa')
KINDS = ('given', 'fine-tuned', 'transferred', 'student from files')


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv('KDNOTES_HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    return tmp_path


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
            few = [{k: v for k, v in row.items() if k in _COLUMNS[task]} for row in rows[:40]]
            (folder / f'{split}.jsonl').write_text('\n'.join(map(json.dumps, few)))


_COLUMNS = dict(
    text_classification=('text', 'label'),
    extractive_qa=('id', 'question', 'context', 'answer', 'answer_start'),
)


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
    teachers = changed[1:] if config.student_init != 'hub' else []
    return 'made anew' if changed[0] and all(teachers) else 'used'


def table_of(task: str, kind: str, place: Path) -> dict[str, str]:
    "Change -> what becomes of the runs of a kind of teacher; the folder is put back after each."
    folder = model_for(task, place / 'model')
    if kind == 'student from files':
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


@pytest.mark.parametrize('task', TASKS)
@pytest.mark.parametrize('kind', KINDS)
def test_no_changed_file_is_read_under_the_old_name(task, kind, home):
    found = table_of(task, kind, home)
    # the tokenizer is the teacher's: a student from files is read by another's
    texts = ('token', 'vocab', 'special', 'added')
    unread = {name for name in CHANGES if kind == 'student from files' and name.startswith(texts)}
    assert {name for name in CHANGES.keys() - unread if found[name] == 'used'} == set()
    assert {found[name] for name in SAME} == {'used'}
    assert all(found[name] == 'refused' for name in found if name.endswith(('torn', 'gone')))


if __name__ == '__main__':  # prints the table: python tests/test_identity.py
    import tempfile

    os.environ['HF_HUB_OFFLINE'] = '1'
    columns = [(task, kind) for task in TASKS for kind in KINDS]
    rows = {}
    for task, kind in columns:
        with tempfile.TemporaryDirectory() as place:
            os.environ['KDNOTES_HOME'] = f'{place}/home'
            for name, what in table_of(task, kind, Path(place)).items():
                rows.setdefault(name, []).append(what)
    print('| file |', ' | '.join(f'{task}, {kind}' for task, kind in columns), '|')
    print('|---' * (len(columns) + 1) + '|')
    for name, found in rows.items():
        print(f'| {name} |', ' | '.join(found), '|')
