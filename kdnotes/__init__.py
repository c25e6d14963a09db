__version__ = "0.1.0"

_API = ('Data', 'Run', 'compare', 'distil', 'doctor', 'finetune', 'load_data', 'load_run', 'study')


def __getattr__(name):
    "The names of `kdnotes.api`, loaded when they are first used."
    if name not in _API:
        raise AttributeError(f'module kdnotes has no attribute {name!r}; it has {", ".join(_API)}')
    from . import api

    return getattr(api, name)


def __dir__():
    return sorted([*globals(), *_API])
