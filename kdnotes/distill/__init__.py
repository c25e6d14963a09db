"Models and their students, intermediate layers, the teacher cache. Knows no training."

import sys
from types import ModuleType


class _Called(ModuleType):
    "`kd.distill(...)` is `kd.distil(...)`: people type it either way, and this folder has one of the names."

    def __call__(self, *args, **parameters):
        from kdnotes.api import distil

        return distil(*args, **parameters)


sys.modules[__name__].__class__ = _Called
