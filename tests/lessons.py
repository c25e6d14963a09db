"""The lessons of the notebooks as tests of the exported modules, for `make mutation`: their cells run on the
names of the module, and not on what the notebook itself defines.
"""

import importlib
import json
from pathlib import Path
import matplotlib
import matplotlib.pyplot as plt
import pytest

NOTEBOOKS = Path(__file__).resolve().parents[1] / 'nbs'
LESSONS = {
    'train.loop': 'train/10_loop',
    'train.checkpoint': 'train/06_checkpoint',
    'distill.heads': 'distill/01_heads',
    'distill.needed_positions': 'distill/03_needed_positions',
    'distill.teacher_cache': 'distill/05_teacher_cache',
    'distill.students': 'distill/07_students',
    'losses.targets': 'losses/01_targets',
    'losses.vocabulary': 'losses/03_vocabulary',
    'tasks.batching': 'tasks/01_batching',
    'tasks.ranking_metrics': 'tasks/07_ranking_metrics',
    'stats.intervals': 'stats/01_intervals',
}


def lesson_cells(
    notebook: Path,
) -> list[str]:  # sources of the code cells that are not exported
    "What a notebook runs on what it defines."
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    sources = [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']
    return [source for source in sources if not source.startswith(('#| export', '#| default_exp'))]


@pytest.mark.filterwarnings('default')
@pytest.mark.parametrize('module', LESSONS)
def test_lesson(module, monkeypatch):
    notebook = NOTEBOOKS / f'{LESSONS[module]}.ipynb'
    monkeypatch.chdir(notebook.parent)
    matplotlib.use('agg')
    names = dict(vars(importlib.import_module(f'kdnotes.{module}')))
    try:
        for source in lesson_cells(notebook):
            exec(compile(source, notebook.name, 'exec'), names)
    finally:
        plt.close('all')
