"""The groups of `Config` about evaluation, links, copies and metrics; none affects learning."""

from __future__ import annotations

from dataclasses import dataclass

from apex_jax.config.key import key


@dataclass(frozen=True)
class EvaluatorConfig:
    """Full games with the newest weights, or with those of a checkpoint."""

    episodes: int = key(10, "full games of an evaluation, played side by side", "episodes", 1, 1000)
    epsilon: float = key(0.00164, "DQN: probability of a random action", "", 0, 1)
    interval_updates: int = key(
        0, "processes=one: updates between evaluations; 0 = a tenth of total_updates, else 5,000", "updates", 0, 10**12
    )
    interval_seconds: float = key(
        60.0, "pause from the end of an evaluation to the start of the next", "seconds", 0, 10**6
    )
    max_episode_frames: int = key(108_000, "time limit of a game", "frames", 16, 10**9)
    stop_at_return: float = key(
        0.0,
        "the run ends, as at its other limits, once an evaluation has at least this mean return; 0 = never (for 0"
        " itself: 0.001)",
        "",
        -1e9,
        1e9,
    )
    checkpoint: str = key(
        "",
        "evaluated once: the newest checkpoint of a run directory RUN, RUN/checkpoints/<updates>, or RUN/best, the"
        " params of the best evaluation; empty = follow the learner",
    )
    video: str = key(
        "",
        "a game is recorded to this file after the last evaluation: .mp4, .gif, or without ending both; without a"
        " folder, in the run directory; empty = video when a run ends, none of a checkpoint",
    )
    device: str = key(
        "auto",
        "where the policy runs; auto = GPU if there is one, but CPU with learner.device=cpu",
        choices=("auto", "cpu", "gpu"),
    )


@dataclass(frozen=True)
class AddressConfig:
    """Where each link is served: ZMQ addresses (tcp://host:port, or ipc://path on one machine).

    The replay server binds experience and sampling, the learner binds weights; every other role connects.
    """

    experience: str = key("tcp://127.0.0.1:5550", "actors send segments to the replay server here")
    sampling: str = key("tcp://127.0.0.1:5551", "the learner draws from the replay server here")
    weights: str = key("tcp://127.0.0.1:5552", "the learner sends weights from here")
    status: str = key(
        "",
        "each process serves its status here, over HTTP without a key: GET /status, or the command `status ADDRESS`;"
        " whoever can reach the address can read it; empty = nowhere",
    )


@dataclass(frozen=True)
class StorageConfig:
    """A copy of the run elsewhere, from which a replaced machine goes on."""

    url: str = key(
        "",
        "checkpoints, metrics and replay are copied here: s3://bucket/prefix, file:///path or a folder; a start"
        " without a checkpoint of its own, or behind the copy of its own run, fetches that; credentials come from"
        " boto's usual places; empty = nowhere",
    )
    interval_seconds: float = key(300.0, "pause between two copies", "seconds", 1, 10**6)


@dataclass(frozen=True)
class SecurityConfig:
    """Keys of the links that go over tcp; the command `keys create DIR` makes them."""

    keys: str = key(
        "",
        "directory of CURVE keys: every tcp link is encrypted and lets in known keys only; empty = those of"
        " APEX_JAX_<ROLE>_SECRET and APEX_JAX_<ROLE>_PUBLIC, or without these no tcp beyond loopback",
    )
    insecure: bool = key(False, "tcp beyond loopback without keys: whoever reaches a port can read and feed the run")


@dataclass(frozen=True)
class MetricsConfig:
    """Numbers of one's own, and where metrics go, beside the status page."""

    info: tuple[str, ...] = key(
        (),
        "numbers that `info` of the environment holds at the end of a game, such as [is_success]: each becomes a curve"
        " of the training games and one of the evaluations",
    )

    loggers: tuple[str, ...] = key(
        ("tensorboard", "jsonl"),
        "jsonl (which has to be there: live view, plots and limits read it), tensorboard, prometheus (/metrics at"
        " addresses.status), and installed modules with init, log and finish like wandb and trackio; these get the"
        " metrics of learner, replay server and evaluator",
    )
    project: str = key("apex-jax", "project of wandb, trackio and their like, in which each run is a group")
