"""Metrics for services such as Weights & Biases or Trackio: any module with `init`, `log` and `finish` of their form.

    module.init(project=, name=, group=, config=)
    module.log(values, step=)
    module.finish()

The learner, the replay server and the evaluator each make one run of the service, because a run there has one writer;
the group of these runs is named like the run directory. Actors make none, since a fleet may have hundreds. A process
that starts again begins a new run in the same group, as it begins a new TensorBoard file.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import SupportsFloat

from apex_jax.config import Config
from apex_jax.host.errors import RunError, UsageError, first_line
from apex_jax.run.provenance import value_of
from apex_jax.settings import SETTINGS

_log = logging.getLogger(__name__)

FILES = ("jsonl", "tensorboard")  # which `MetricsWriter` writes; other names are those of modules
FUNCTIONS = ("init", "log", "finish")
NOT_SENT = ("addresses.", "security.", "storage.")  # keys that are nobody else's business


def check_loggers(config: Config) -> None:
    """Imports the modules of `metrics.loggers`. Raises UsageError for one that is missing or of another form."""
    for name in _modules(config):
        what = f"metrics.loggers: {name}"
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the package that it would be in
            spec = None
        if (
            spec is None or spec.origin is None
        ):  # a folder of this name, such as the one that wandb writes, is no module
            package = name.partition(".")[0]
            raise UsageError(f"{what} is not installed; run `python -m pip install {package}`, or leave it out")
        try:
            module = importlib.import_module(name)
        except Exception as error:  # of any type: it is not ours
            raise UsageError(f"{what} cannot be imported: {first_line(error)}; repair it, or leave it out") from None
        if missing := [function for function in FUNCTIONS if not callable(getattr(module, function, None))]:
            raise UsageError(f"{what} has no {missing[0]}(), as wandb and trackio have; leave it out")


def make_loggers(config: Config, role: str, name: str) -> list[Logger]:
    """Returns the loggers of one process; `name`: of the process within its run."""
    return [] if role == "actor" else [Logger(module, config, name) for module in _modules(config)]


class Logger:
    """A run of a service, which begins at the first values. No failure later on disturbs the process."""

    def __init__(self, name: str, config: Config, process_name: str):
        """`name`: of the module."""
        self.failures = 0
        self._name = name
        self._config = config
        self._process_name = process_name
        # A user who is not logged in has to know before the run has taken hours; a process that is restarted in the
        # middle of a run goes on without the service.
        self._must_begin = not Path(config.directory, "metrics", f"{process_name}.jsonl").exists()
        self._module: ModuleType | None = None
        self._gave_up = False

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Logs the finite values at `step` environment frames.

        Raises RunError if the service does not begin at the first start of the process in its run directory.
        """
        if self._module is None and not self._gave_up:
            self._begin()
        if self._module is None:
            return
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        try:
            self._module.log(finite, step=step)
        except Exception as error:  # of any type: it is not ours
            self._fail("does not take metrics", error)

    def finish(self) -> None:
        """Ends the run of the service, if it has begun."""
        if self._module is None:
            return
        try:
            self._module.finish()
        except Exception as error:
            self._fail("did not end its run", error)

    def _begin(self) -> None:
        group = Path(self._config.directory).absolute().name
        sent = [name for name in SETTINGS if not name.startswith(NOT_SENT)]
        try:
            module = importlib.import_module(self._name)
            module.init(
                project=self._config.metrics.project,
                name=f"{group}-{self._process_name}",
                group=group,
                config={name: value_of(self._config, name) for name in sent},
            )
        except Exception as error:
            self._gave_up = True
            if self._must_begin:
                raise RunError(
                    f"metrics.loggers: {self._name} does not begin: {first_line(error)}; repair that, or leave it out"
                ) from None
            self._fail("does not begin", error)
        else:
            self._module = module

    def _fail(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            _log.warning("%s %s (logged once): %s; the other metrics go on", self._name, what, first_line(error))


def _modules(config: Config) -> list[str]:
    return [name for name in config.metrics.loggers if name not in FILES]
