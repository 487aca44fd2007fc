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
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, SupportsFloat

from apex_jax.config import Config
from apex_jax.config.load import SETTINGS
from apex_jax.host.errors import FatalError, UsageError, first_line
from apex_jax.run.provenance import is_of_the_machine, value_of

_log = logging.getLogger(__name__)

FILES = ("jsonl", "tensorboard")  # `MetricsWriter` writes these
PROMETHEUS = "prometheus"  # reads the status; all other names are names of modules
FUNCTIONS = ("init", "log", "finish")


def check_loggers(config: Config) -> None:
    """Imports the modules of `metrics.loggers`. Raises UsageError for one that is missing or of another form.

    Prometheus needs no module, but an address: it fetches /metrics there.
    """
    if PROMETHEUS in config.metrics.loggers and not config.addresses.status:
        address = "addresses.status=tcp://127.0.0.1:8080"
        raise UsageError(f"metrics.loggers: prometheus fetches /metrics from addresses.status; add {address}")
    for name in _modules(config):
        what = f"metrics.loggers: {name}"
        package = name.partition(".")[0]
        try:
            module = importlib.import_module(name)
        except Exception as error:  # of any type: it is not ours
            fix = f"run `python -m pip install {package}`, or leave it out"
            raise UsageError(f"{what} cannot be imported: {first_line(error)}; {fix}") from None
        if missing := [function for function in FUNCTIONS if not callable(getattr(module, function, None))]:
            raise UsageError(f"{what} has no {missing[0]}(), as wandb and trackio have; leave it out")


def make_loggers(config: Config, role: str, name: str) -> list[Logger]:
    """Starts and returns the loggers of one process. `name`: the name of the process. Raises FatalError."""
    return [] if role == "actor" else [Logger(module, config, name) for module in _modules(config)]


class Logger:
    """A run of a service. Once it has begun, no failure disturbs the process."""

    def __init__(self, name: str, config: Config, process_name: str):
        """Begins the run, which may take a minute without a network. `name`: name of the module.

        Raises FatalError if the service refuses the first start of the process in its run directory, because a user who
        is not logged in has to know before the run has taken hours. A later start goes on without the service.
        """
        self.failures = 0
        self._name = name
        self._module: ModuleType | None = None
        is_first_start = not Path(config.directory, "metrics", f"{process_name}.jsonl").exists()
        group = Path(config.directory).absolute().name
        sent = [key for key in SETTINGS if not is_of_the_machine(key)]
        try:
            module = importlib.import_module(name)
            module.init(
                project=config.metrics.project,
                name=f"{group}-{process_name}",
                group=group,
                config={key: value_of(config, key) for key in sent},
            )
        except Exception as error:  # of any type: it is not ours
            if is_first_start:
                what = f"metrics.loggers: {name} does not begin: {first_line(error)}"
                raise FatalError(f"{what}; repair that, or leave it out") from None
            self._fail("does not begin", error)
        else:
            self._module = module

    def log(self, step: int, values: Mapping[str, SupportsFloat]) -> None:
        """Logs the finite values at `step` environment frames."""
        finite = {tag: float(value) for tag, value in values.items() if math.isfinite(value)}
        self._call("log", "does not take metrics", finite, step=step)

    def finish(self) -> None:
        """Ends the run of the service."""
        self._call("finish", "did not end its run")

    def _call(self, function: str, failure: str, *arguments: Any, **options: Any) -> None:
        if self._module is not None:
            try:
                getattr(self._module, function)(*arguments, **options)
            except Exception as error:
                self._fail(failure, error)

    def _fail(self, what: str, error: Exception) -> None:
        self.failures += 1
        if self.failures == 1:
            _log.warning("%s %s (logged once): %s; the other metrics go on", self._name, what, first_line(error))


def _modules(config: Config) -> list[str]:
    return [name for name in config.metrics.loggers if name not in (*FILES, PROMETHEUS)]
