"""The parts common to every role's process: metrics, report, sockets, run identity and storage copy."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, SupportsFloat, TypeAlias

import zmq

from apex_jax.config import Config
from apex_jax.environments.environment import describe
from apex_jax.links.connection import LinkEnd
from apex_jax.operations.process_report import ProcessReport
from apex_jax.operations.storage_copy import StorageCopy
from apex_jax.process import StopSignal, lock_name
from apex_jax.run.environment_spec import read_environment_spec
from apex_jax.run.identity import RunIdentity
from apex_jax.run.loggers import Logger, make_loggers
from apex_jax.run.metrics import MetricsWriter, is_tag, resident_memory_bytes
from apex_jax.transport.security import LinkContext, security_of
from apex_jax.types import EnvironmentSpec

DESCRIBED = "APEX_JAX_DESCRIBED"  # set by the local supervisor: the folder with the description of the run's task
Role: TypeAlias = Literal["actor", "replay", "learner", "evaluator"]


class RoleContext:
    """The common parts of a role, as one argument. Its report has the metrics that the role writes last.

    A role sets `describe`, which returns its part of the report without metrics, see `ProcessReport`.
    """

    def __init__(
        self,
        config: Config,
        sockets: zmq.Context,
        name: str,
        stop: StopSignal | None = None,
        storage: StorageCopy | None = None,
    ):
        """`name`: of the process within its run; `sockets`: ZMQ context for the role's links."""
        self.config = config
        self.sockets = sockets
        self.stop = stop or StopSignal()
        self.run_identity = RunIdentity(config.directory)
        self.describe: Callable[[], Mapping[str, Any]] = dict
        self._storage = storage
        self.loggers: list[Logger] = []  # of services, beside the files
        self._writer = MetricsWriter(config.directory, name, "tensorboard" in config.metrics.loggers)
        self._written: dict[str, SupportsFloat] = {}

    def link_end(self, name: str) -> LinkEnd:
        """Returns the end of the link of this name in `addresses`, such as "weights"."""
        address = getattr(self.config.addresses, name)
        return LinkEnd(self.sockets, address, self.run_identity, self.config.away_limit_seconds)

    def write_metrics(
        self, environment_steps: int, values: Mapping[str, SupportsFloat], dropped: Counter[str] | None = None
    ) -> None:
        """Writes values by tag of `apex_jax.run.metrics.TAGS`, and the values common to every process.

        `environment_steps`: of the run, as known to the process; `dropped`: counts of rejected data, by reason.
        """
        self._written = {
            **values,
            **{f"replay/dropped_{reason}": number for reason, number in (dropped or {}).items()},
            **(self._storage.metrics() if self._storage is not None else {}),
            "system/resident_memory_bytes": resident_memory_bytes(),
        }
        frames = environment_steps * self.config.environment.frame_skip
        self._writer.write(frames, self._written)
        for logger in self.loggers:
            logger.log(frames, self._written)

    def report(self) -> dict[str, Any]:
        """Returns the role's part of the report, with its metrics. Callable from any thread."""
        security = self.sockets.report() if isinstance(self.sockets, LinkContext) else {}
        content, metrics, errors = self.describe(), self._written, []
        if self._storage is not None:
            metrics, errors = {**metrics, **self._storage.metrics()}, self._storage.errors
        errors = [*content.get("errors", []), *errors]
        return {**content, **security, "errors": errors, "metrics": metrics}


def task_description(config: Config) -> EnvironmentSpec:
    """Returns the description of the run's task: that which the local supervisor has passed on, or a new one.

    So an environment of the user is made only where it is stepped. Raises the errors of `describe`.
    """
    folder = os.environ.get(DESCRIBED)
    return read_environment_spec(folder) if folder else describe(config)


def checked_description(config: Config, is_tried: bool = False) -> EnvironmentSpec:
    """Returns the description of the run's task, after checks that need its observations and actions.

    Every process but the replay server calls it before it starts anything; the local supervisor has made the checks
    for its roles. Raises UsageError or RunError, see `describe`, `resolved` and `check_user_code`.
    """
    if os.environ.get(DESCRIBED):
        return task_description(config)
    # Not at the top: the replay server needs no JAX.
    from apex_jax.agent.registry import check_user_code, resolved

    environment_spec = describe(config, is_tried)
    resolved(config, environment_spec.spec)
    check_user_code(config, environment_spec.spec, is_tag)
    return environment_spec


@contextlib.contextmanager
def open_role(config: Config, role: Role, name: str, stop: StopSignal) -> Iterator[RoleContext]:
    """Reports what the process does, fetches missing files of its run, and yields the role's context.

    Raises RunError if a resource is unavailable, UsageError for missing or malformed keys.
    """
    with contextlib.ExitStack() as opened:
        if role == "actor" or role == "evaluator":  # the other roles lock their files
            opened.enter_context(lock_name(config.directory, name))
        report = opened.enter_context(ProcessReport(config, role, name, stop))
        storage = None
        if role == "learner" or role == "replay":
            storage = opened.enter_context(StorageCopy(config, role, stop))
        stop.has_begun = False  # it is true of a fetch, but the start may still be refused
        loggers = make_loggers(config, role, name)  # before there are links, which would miss heartbeats meanwhile
        for logger in loggers:
            opened.callback(logger.finish)
        sockets = LinkContext.of(security_of(config, role))
        opened.callback(sockets.term)
        context = RoleContext(config, sockets, name, stop, storage)
        context.loggers = loggers
        report.describe = context.report
        yield context
