"""A fleet of real processes over loopback tcp; each connection can go through its own proxy."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from apex_jax.config.load import load
from apex_jax.environments.environment import describe
from apex_jax.process import digest_of_peer_id
from apex_jax.replay.header import Header
from apex_jax.replay.snapshots import Snapshots
from apex_jax.run.metrics import read_metrics
from apex_jax.types import PEER_TIMEOUT_SECONDS
from tests.rigs.ports import free_port
from tests.rigs.processes import ROOT, Program, Programs, catch, leave, values, wait_until
from tests.rigs.proxy import Proxy

PROCESS = re.compile(r"acting in .* \(process ([0-9a-f]{16})\)")  # the digest of an actor's peer id, in its log
ENDLESS = "total_updates=100000000"
START_SECONDS = 150.0  # until something is learned, on such a machine and with nothing compiled
BUSY_SECONDS = 5.0  # that everything may take longer than it should, on such a machine
FORGOTTEN_SECONDS = PEER_TIMEOUT_SECONDS + BUSY_SECONDS  # until a peer that is silent is no longer counted
CONNECTS_TO = {
    "replay": (),
    "learner": ("sampling",),
    "actor": ("experience", "weights"),
    "evaluator": ("weights",),
}


def role_of(name: str) -> str:
    """Returns the role of a process: `actor-1` is an actor."""
    return name.partition("-")[0]


class Fleet:
    """Starts roles by name, and reads their progress from their metrics."""

    def __init__(self, programs: Programs, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.running: dict[str, Program] = {}  # the last of each name, which may have ended
        self.proxies: dict[tuple[str, str], Proxy] = {}  # by name of the client, and link
        self.statuses: dict[str, str] = {}  # address of the status of each process that serves it
        self._programs = programs
        self._arguments = arguments
        self.addresses = {link: f"tcp://127.0.0.1:{free_port()}" for link in ("experience", "sampling", "weights")}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                leave(self.running.values())
        finally:
            for proxy in self.proxies.values():
                proxy.close()

    def start(self, *names: str, lines: str = "") -> Program:
        """Starts and restarts processes; returns the last of them. `lines`: see `Program`."""
        for name in names:
            addresses = [f"addresses.{link}={self._of_link(name, link)}" for link in self.addresses]
            if name in self.statuses:
                addresses.append(f"addresses.status={self.statuses[name]}")
            arguments = catch(self.directory, ENDLESS, *addresses, *self._arguments)
            self.running[name] = self._programs.start("--role", role_of(name), "--name", name, *arguments, lines=lines)
        return self.running[names[-1]]

    def proxy(self, name: str, link: str) -> Proxy:
        """Returns the proxy through which a process uses a link; ask for it before the start."""
        assert link in CONNECTS_TO[role_of(name)], f"{name} does not connect to {link}"
        if (name, link) not in self.proxies:
            self.proxies[name, link] = Proxy(self.addresses[link])
        return self.proxies[name, link]

    def all_proxies(self, name: str) -> list[Proxy]:
        """Returns the proxies through which a process uses its links; ask for them before the start."""
        return [self.proxy(name, link) for link in CONNECTS_TO[role_of(name)]]

    def end(self, name: str, by: signal.Signals = signal.SIGKILL) -> int:
        """Ends a process, waits until it has gone, and returns its exit code."""
        self.running[name].send(by)
        return self.running[name].exit_code()

    def updates(self) -> float:
        """Returns the learner's newest count, which falls where it restarts."""
        return self.newest("learner", "learner/updates", 0.0)

    def actors(self) -> float:
        """Returns how many actors the replay server counted last."""
        return self.newest("replay", "replay/actors", 0.0)

    def newest(self, name: str, tag: str, otherwise: float) -> float:
        """Returns the last value that a process has written under a tag."""
        return ([otherwise, *values(self.directory, name, tag)])[-1]

    def lines(self, name: str) -> int:
        """Returns how many lines of metrics a process has written: of a server four a second, whatever happens."""
        return len(values(self.directory, name, "system/resident_memory_bytes"))

    def dropped(self) -> dict[str, float]:
        """Returns the refusals of the replay server by reason."""
        start = "replay/dropped_"
        line = read_metrics(self.directory / "metrics" / "replay.jsonl")[-1]
        return {tag.removeprefix(start): value for tag, value in line.items() if tag.startswith(start) and value}

    def with_traceback(self) -> list[str]:
        """Returns the names of the processes that have written a traceback since their last start."""
        return [name for name, program in self.running.items() if "Traceback" in program.stderr]

    def _of_link(self, name: str, link: str) -> str:
        """Returns the address of a link, that of its proxy if there is one."""
        proxy = self.proxies.get((name, link))
        return proxy.address if proxy else self.addresses[link]


def begins(fleet: Fleet, actors: int) -> None:
    """Waits until the actors are there and something was learned."""
    fleet.running["learner"].wait_until(lambda: fleet.actors() == actors and fleet.updates() > 0, START_SECONDS)


def goes_on(fleet: Fleet) -> None:
    """Waits until the learner has made some more updates."""
    updates = fleet.updates()
    try:
        wait_until(lambda: fleet.updates() > updates + 100)
    except AssertionError as error:
        said = "\n".join(f"{name}:\n{program.stderr[-2000:]}" for name, program in fleet.running.items())
        raise AssertionError(f"{fleet.updates()} updates, of which {updates} are old: {error}\n{said}") from None


def acts(fleet: Fleet, name: str) -> None:
    """Waits until an actor has acted for some more time."""
    lines = fleet.lines(name)
    wait_until(lambda: fleet.lines(name) >= lines + 3 and fleet.newest(name, "actor/steps_per_second", 0.0) > 0)


def lasts(seconds: float) -> None:
    """Lets a fault last."""
    threading.Event().wait(seconds)


def losses_said(fleet: Fleet) -> int:
    """Returns how often the learner has logged that it lost the replay server, which it does in one of three ways.

    A learner that connects again before it sees what became of its connection receives that from the server.
    """
    said = fleet.running["learner"].stderr
    return said.count(": looking for it") + said.count("no longer knows this process")


def newest_ledger(directory: Path) -> dict[str, float]:
    """Returns the newest ledger in the metrics of the replay server, by name."""
    line = read_metrics(directory / "metrics" / "replay.jsonl")[-1]
    return {tag.removeprefix("ledger/"): value for tag, value in line.items() if tag.startswith("ledger/")}


def ledger_violations(directory: Path, actors: Mapping[str, Program]) -> list[str]:
    """Returns where the ledger of an ended fleet differs from what the rate limiter and these actors counted.

    `actors`: that ended regularly, before the replay server, by name.
    """
    config = load(ROOT / "configs" / "catch.yaml")
    header = Header(directory / "replay", config.compatibility_key, describe(config).spec)
    saved = Snapshots(directory / "replay", header).read_newest()
    assert saved is not None, "the replay server has left no snapshot"
    ledger, lines = newest_ledger(directory), []
    if ledger["produced"] < sum(ledger.values()) - ledger["produced"]:
        lines.append(f"the ledger has more outcomes than transitions: {ledger}")
    if ledger["stored"] != saved.limiter["inserted"]:
        lines.append(f"the ledger has {ledger['stored']:g} transitions stored, the replay {saved.limiter['inserted']}")
    produced = {int(digest_of_peer_id(peer_id), 16): number for peer_id, _, number in saved.ledger.actors().tolist()}
    for name, program in actors.items():
        [process] = PROCESS.findall(program.stderr)
        steps = read_metrics(directory / "metrics" / f"{name}.jsonl")[-1]["actor/environment_steps"]
        if produced.get(int(process, 16), 0) != steps:  # each step is one transition
            lines.append(f"{name} made {steps} transitions, the ledger has {produced.get(int(process, 16), 0)}")
    return lines
