"""EnvPool, whose families of tasks (atari, mujoco.dmc, ...) are imported when one of their tasks is described or made.

EnvPool imports them all at once, a second at the start of every process, and with Jumanji's also Matplotlib, which sets
MPLBACKEND and MPLCONFIGDIR for the user's whole program, which then opens no windows.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _ImportedLater(ModuleType):
    """Stands for a package until one of its names is used; its submodules can be imported before."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of the import system, and of whoever looks through all modules
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


if "envpool" not in sys.modules:
    _spec = importlib.util.find_spec("envpool")
    if _spec is not None and _spec.origin is not None:
        _root = Path(_spec.origin).parent
        for _folder in [path.parent for path in _root.rglob("*/registration.py")]:  # of the names of a family's tasks
            _name, _path = ".".join(_folder.relative_to(_root.parent).parts), [str(_folder)]
            _module, _init = _ImportedLater(_name), _folder / "__init__.py"
            _module.__spec__ = importlib.util.spec_from_file_location(_name, _init, submodule_search_locations=_path)
            _module.__path__ = _path
            sys.modules[_name] = _module

envpool: Any = importlib.import_module("envpool")
