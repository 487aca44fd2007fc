"""EnvPool, whose renderer of Jumanji's games is imported when one of them is made.

EnvPool imports it at once, and Matplotlib with it: that is most of a second at the start of every process, and sets
MPLBACKEND and MPLCONFIGDIR for the user's whole program, which then opens no windows.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

_NAME = "envpool.jumanji"


class _ImportedLater(ModuleType):
    """Stands for a package until one of its names is used; its submodules can be imported before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the import system, and of whoever looks through all modules
            raise AttributeError(name)
        del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


if "envpool" not in sys.modules:
    _spec = importlib.util.find_spec("envpool")
    if _spec is not None and _spec.origin is not None:
        _package = _ImportedLater(_NAME)
        _package.__path__ = [str(Path(_spec.origin).with_name("jumanji"))]
        sys.modules[_NAME] = _package

envpool: Any = importlib.import_module("envpool")
