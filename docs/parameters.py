"The page of a run's parameters, made of `RunSpec`, `Where` and what each task reads besides."

from types import NoneType
from typing import Any, Literal, get_args, get_origin
from kdnotes.commands.options import HEADINGS, as_typed, comments
from docs.markdown import code, comment, escaped, table

COLUMNS = ('parameter', 'default', 'values', 'meaning')
KINDS = {int: 'a whole number', float: 'a number', str: 'a text', bool: '`true` or `false`'}
BOUNDS = {'ge': 'at least {}', 'gt': 'above {}', 'le': 'at most {}', 'lt': 'below {}'}


def kinds(annotation: Any) -> list[str]:  # Markdown
    "What a parameter may be, one kind an entry."
    if get_origin(annotation) is Literal:
        return [code(str(choice)) for choice in get_args(annotation)]
    if get_origin(annotation) is tuple:
        return [f'{KINDS[get_args(annotation)[0]]} or several, with commas']
    if annotation is NoneType:
        return ['`none`']
    return [KINDS[annotation]] if annotation in KINDS else [k for a in get_args(annotation) for k in kinds(a)]


def values(field: Any) -> str:  # Markdown
    "What a parameter may be, and between which bounds."
    bounds = [
        words.format(f'{getattr(rule, name):g}' if getattr(rule, name) != 2**32 else '2^32')
        for rule in field.metadata
        for name, words in BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    found = ', '.join(kinds(field.annotation))
    return found + ''.join(f', {escaped(bound)}' for bound in bounds)


def row(name: str, field: Any, said: str, group: str) -> tuple[str, ...]:
    "A parameter as a row, which others can link to."
    about = comment(said.replace('None:', 'none:'))
    # an index entry: the search leads to it before all pages that mention the name
    typed = f'[{{index}}`{name} <!{name}>`]{{#{group}-{name} .parameter}}'
    return typed, code(as_typed(field.default)), values(field), about


def of_task(task: str) -> str:
    "The parameters that one task declares."
    from kdnotes.core.config import task_info

    model = task_info(task).settings
    texts = comments(model)
    rows = [row(n, field, texts[n], task.replace('_', '-')) for n, field in model.model_fields.items()]
    return table(COLUMNS, rows, 'parameters')


def of_all_tasks() -> str:
    "The parameters of every run, by group."
    from kdnotes.core.spec import FLAT_NAMES, GROUPS

    parts = []
    for group, model in GROUPS.items():
        texts = comments(model)
        rows = [
            row(name, known.field, texts[known.name], 'parameter')
            for name, known in FLAT_NAMES.items()
            if known.group == group
        ]
        parts += [f'### {escaped(HEADINGS[group].capitalize())}', table(COLUMNS, rows, 'parameters')]
    return '\n\n'.join(parts)


def own_defaults(task: str, mode: str) -> str:
    "What a run of a task takes where nothing is given, unlike those of the first task."
    from kdnotes.core.config import task_info

    usual = task_info(task).usual(dict(mode=mode))
    said = ', '.join(code(f'{name}={as_typed(value)}') for name, value in usual.items())
    return f'Other defaults for this task: {said}.' if said else ''


def presets() -> str:
    "What each preset sets."
    from kdnotes.core.arms import PRESETS

    rows = [
        (code(name), ', '.join(code(f'{key}={as_typed(value)}') for key, value in found.items()))
        for name, found in PRESETS.items()
        if found
    ]
    return table(('preset', 'sets'), rows, 'parameters')


def modes() -> str:
    "What each mode trains."
    from kdnotes.core.arms import MODES

    rows = [
        (code(name), m.network, m.precision, 'yes' if m.kd else 'no', escaped(m.ranks), escaped(m.role))
        for name, m in MODES.items()
    ]
    return table(('mode', 'network', 'precision', 'KD', 'ranks', 'role'), rows)


def parameters_page() -> str:
    "Every parameter of a run."
    from kdnotes.core.config import TASKS
    from kdnotes.core.spec import Where

    mode = Where.model_fields['mode'].default
    parts = [
        '# Parameters of a run',
        "Set parameters with `-p name=value` on the command line, `P='name=value'` with make, in the "
        "parameters cell of a notebook, or as keyword arguments in Python. They have the same names and "
        "values everywhere.",
        '## All tasks',
        of_all_tasks(),
    ]
    for task in TASKS:
        parts += [
            f'## Only task={task}',
            of_task(task),
            own_defaults(task, mode),
        ]
    parts += ['## Modes', modes(), '## Presets', presets()]
    return '\n\n'.join(filter(None, parts)) + '\n'
