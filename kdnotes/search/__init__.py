"Search for the students that are worth their size, and for settings; a trial is a run."

import sys
from types import ModuleType


class _Called(ModuleType):
    "`kd.search(...)` is `kdnotes.api.search(...)`: the folder has the function's name."

    def __call__(self, *args, **parameters):
        from kdnotes.api import search

        return search(*args, **parameters)


sys.modules[__name__].__class__ = _Called
