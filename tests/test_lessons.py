"The lessons: each asks a question, shows a figure, has an exercise with its answer, and runs."

import base64
import json
import re
from pathlib import Path
import matplotlib
import pytest
from IPython.core.interactiveshell import InteractiveShell

ROOT = Path(__file__).resolve().parents[1]
LESSONS = sorted((ROOT / 'nbs' / 'lessons').glob('*.ipynb'))
MOST_BYTES = 60_000  # of a figure
# what a quick run of a lesson is given; nothing: the lesson is quick by itself, and must show what is stored
QUICK = {
    'lesson_01_ten_minutes': dict(layers=1, smoke=True, texts_read=200),
    'lesson_02_dark_knowledge': dict(steps=3, texts_read=200),
    'lesson_03_number_formats': dict(steps=10),
    'lesson_04_many_ranks': dict(steps=3),
    'lesson_05_fair_test': dict(seeds=8, steps=3),
    'lesson_06_unlabelled_texts': dict(steps=3, seeds=1, texts_read=200),
    'lesson_07_precision_and_rate': dict(steps=3, seeds=2, rates=[0.01, 0.3]),
    'lesson_08_perplexity': {},
    'lesson_09_no_answer': {},
    'lesson_10_which_student': dict(trials=4, steps=3, again=2),
    'lesson_11_energy': {},
    'lesson_12_dropout': dict(steps=3, seeds=2),
}


def cells_of(lesson: Path) -> list[dict]:
    "The cells, their source as one string."
    read = json.loads(lesson.read_text(encoding='utf-8'))['cells']
    return [cell | {'source': ''.join(cell['source'])} for cell in read]


def is_hidden(cell: dict) -> bool:
    return cell['source'].startswith('#| hide')


def is_parameters(cell: dict) -> bool:
    return 'parameters' in cell['metadata'].get('tags', [])


def kinds(outputs: list[dict]) -> set[str]:
    "What a cell shows: streams by name, and all MIME types; not its progress, which slow ones show."
    outputs = [o for o in outputs if o['output_type'] != 'display_data']
    return {o.get('name') or o['output_type'] for o in outputs} | {
        k for o in outputs for k in o.get('data', {})
    }


def printed(outputs: list[dict]) -> str:
    return ''.join(''.join(o['text']) for o in outputs if o['output_type'] == 'stream')


@pytest.fixture(params=LESSONS, ids=lambda p: p.stem)
def lesson(request) -> Path:
    return request.param


def test_every_lesson_has_its_quick_form_and_its_number():
    assert [p.stem for p in LESSONS] == sorted(QUICK)
    numbers = [int(re.match(r'lesson_(\d\d)_', p.stem)[1]) for p in LESSONS]
    assert numbers == list(range(1, len(LESSONS) + 1))


def test_a_lesson_has_the_form_of_all(lesson):
    cells = cells_of(lesson)
    texts = [cell['source'] for cell in cells if cell['cell_type'] == 'markdown']
    assert re.fullmatch(r'# [^\n]+\?\n\n> [^\n]+\n\n- skip_exec: true', texts[0]), 'a question and a promise'
    assert 'You need to know' in texts[1], 'why it matters, and what one needs'
    [exercise] = [text for text in texts if text.startswith('## Exercise\n')]
    assert re.search(r'\n<details>\n<summary>Answer</summary>\n\n.+\n</details>$', exercise, re.S)
    assert texts[-1].startswith('## What to read next\n') and texts[-1].count('](') >= 2
    [given] = [cell['source'] for cell in cells if is_parameters(cell)]
    defined = re.findall(r'^(\w+) = ', given, re.M)
    assert set(QUICK[lesson.stem]) <= set(defined)


def test_a_lesson_shows_a_figure_with_its_caption(lesson):
    cells = cells_of(lesson)
    found = 0
    for cell, following in zip(cells, cells[1:]):
        pictures = [
            o['data']['image/png'] for o in cell.get('outputs', []) if 'image/png' in o.get('data', {})
        ]
        for picture in pictures:
            assert len(base64.b64decode(''.join(picture))) < MOST_BYTES
            assert following['source'].startswith('**Figure.** '), 'a caption below it'
        found += len(pictures)
    assert found


def test_a_lesson_is_stored_as_it_was_executed(lesson):
    shown = [cell for cell in cells_of(lesson) if cell['cell_type'] == 'code' and not is_hidden(cell)]
    last = re.compile(r'^(print\(|\w+\(\)$)')
    for cell in shown:
        lines = cell['source'].rstrip().split('\n')
        assert cell['outputs'] or not last.match(lines[-1]), (
            f'nothing is stored of it: {lines[-1]}; make lessons'
        )
    stored = [output for cell in shown for output in cell['outputs']]
    assert stored and not {'error', 'stderr'} & kinds(stored)
    texts = json.dumps(stored)
    for foreign in (' at 0x', '"/', '/tmp/', '/home/', f'{Path.home()}/'):
        assert foreign not in texts, foreign


def test_what_a_lesson_links_to_is_there(lesson):
    texts = [cell['source'] for cell in cells_of(lesson) if cell['cell_type'] == 'markdown']
    targets = [target for text in texts for target in re.findall(r'\]\((?![a-z]+:)([^)\s#]+)', text)]
    assert targets and [t for t in targets if not (lesson.parent / t).is_file()] == []


@pytest.fixture
def shell(monkeypatch):
    "A notebook's shell in this process, which keeps its home and its figures to itself."
    from execnb.shell import CaptureShell

    for name in ('KDNOTES_HOME', 'KDNOTES_DATA', 'XDG_CACHE_HOME'):
        monkeypatch.setenv(name, '')  # lessons set them, and what they were comes back
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '')
    backend = matplotlib.get_backend()
    yield CaptureShell()
    InteractiveShell.clear_instance()
    matplotlib.use(backend)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings('default')
@pytest.mark.parametrize('lesson', LESSONS, ids=lambda lesson: lesson.stem, indirect=True)
def test_a_lesson_runs(lesson, shell, request, monkeypatch):
    "All of it, with few steps; a cell shows what it has stored, or at least outputs of the same kind."
    monkeypatch.chdir(lesson.parent)
    given = dict(QUICK[lesson.stem])
    if 'smoke' in given:
        given['model'] = str(request.getfixturevalue('small_teacher'))
    for cell in cells_of(lesson):
        if cell['cell_type'] != 'code':
            continue
        outputs = shell.run(cell['source'])
        assert shell.exc is None, f'{cell["source"]}\n{shell.exc!r}'
        if is_parameters(cell):
            shell.run('\n'.join(f'{name} = {value!r}' for name, value in given.items()))
        assert kinds(outputs) == kinds(cell['outputs']), cell['source']
        if not given and 'open_meters(' not in cell['source']:  # another machine may have a meter
            assert printed(outputs) == printed(cell['outputs']), f'{cell["source"]}\nmake lessons'
