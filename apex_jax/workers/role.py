"""What every role's process has besides its work: metrics, a status page, sockets, its run's identity and copy."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, SupportsFloat, TypeAlias

import zmq

from apex_jax.config import Config
from apex_jax.metrics import MetricsWriter, resident_memory_bytes
from apex_jax.operations.status_page import StatusPage
from apex_jax.operations.storage_copy import StorageCopy
from apex_jax.process import StopSignal, name_of_its_own
from apex_jax.run_identity import RunIdentity
from apex_jax.transport.security import LinkContext, link_context

Role: TypeAlias = Literal["actor", "replay", "learner", "evaluator"]


class RoleContext:
    """Handed to a role as one argument. What the role writes as metrics is also what its status page shows."""

    def __init__(
        self,
        config: Config,
        sockets: zmq.Context,
        name: str,
        stop: StopSignal | None = None,
        storage: StorageCopy | None = None,
    ):
        """`name`: of the process within its run; `sockets`: what the role opens its links in."""
        self.config = config
        self.sockets = sockets
        self.stop = stop or StopSignal()
        self.run_identity = RunIdentity(config.directory)
        self.describe: Callable[[], Mapping[str, Any]] = dict  # the rest of the status; called on the page's thread
        self._storage = storage
        self._writer = MetricsWriter(config.directory, name)
        self._written: dict[str, SupportsFloat] = {}

    def write_metrics(
        self, environment_steps: int, values: Mapping[str, SupportsFloat], dropped: Counter[str] | None = None
    ) -> None:
        """Writes values under tags of `apex_jax.metrics.TAGS`, with those that every process has.

        `environment_steps`: of the run, as far as the process knows; `dropped`: what it refused, by reason.
        """
        self._written = {
            **values,
            **{f"replay/dropped_{reason}": number for reason, number in (dropped or {}).items()},
            **(self._storage.metrics() if self._storage is not None else {}),
            "system/resident_memory_bytes": resident_memory_bytes(),
        }
        self._writer.write(environment_steps * self.config.environment.frame_skip, self._written)

    def report(self) -> dict[str, Any]:
        """Returns what the status page shows of the role, from any thread."""
        security = self.sockets.report() if isinstance(self.sockets, LinkContext) else {}
        return {**self.describe(), **security, "metrics": self._written}


@contextlib.contextmanager
def open_role(config: Config, role: Role, name: str, stop: StopSignal) -> Iterator[RoleContext]:
    """Serves the status of the process, fetches what its run directory lacks, and yields what the role needs.

    RunError if something in the way cannot be used, UsageError for missing or malformed keys.
    """
    with contextlib.ExitStack() as opened:
        if role == "actor" or role == "evaluator":  # the others hold a lock on what they write
            opened.enter_context(name_of_its_own(config.directory, name))
        page = opened.enter_context(StatusPage(config, role, name, stop))
        storage = None
        if role == "learner" or role == "replay":
            storage = opened.enter_context(StorageCopy(config, role, stop))
        sockets = link_context(config, role)
        try:
            context = RoleContext(config, sockets, name, stop, storage)
            page.report = context.report
            yield context
        finally:
            sockets.term()
