"""Knowledge distillation x mixed precision x parallel training.

    import kdnotes as kd

    data = kd.load_data(table, columns=dict(question='q', sentence='candidate', label='right'))
    teacher = kd.finetune(data, 'bert-base-uncased')
    student = kd.distil(data, teacher, layers=3, mixed=True)
    print(student.metrics)

`help(kd.distil)` says what a function takes, and `kdnotes parameters` lists the parameters of a run.
"""

__version__ = "0.1.0"

_API = (
    'Data',
    'Run',
    'compare',
    'distil',
    'doctor',
    'finetune',
    'load_data',
    'load_results',
    'load_run',
    'search',
    'study',
)

_ELSEWHERE = {'StopTraining': 'kdnotes.core.processes', 'label': 'kdnotes.labelling.label'}


def __getattr__(name):
    "The names of `kdnotes.api`, loaded when they are first used."
    if name in ('distill', 'search'):  # the folders of these names, which can be called: see there
        import importlib

        return importlib.import_module(f'kdnotes.{name}')
    if name in _ELSEWHERE:
        import importlib

        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    if name not in _API:
        raise AttributeError(f'module kdnotes has no attribute {name!r}; it has {", ".join(_API)}')
    from . import api

    return getattr(api, name)


def __dir__():
    return sorted([*globals(), *_API, *_ELSEWHERE])
