"""An evaluation: full games of one policy, all in parallel, and the record of their returns."""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from apex_jax.agent.algorithm import Algorithm, Params
from apex_jax.config import Config
from apex_jax.environments.atari_scores import human_normalized_score
from apex_jax.environments.environment import EpisodeTracker, VectorEnvironment
from apex_jax.links.weights_client import Weights
from apex_jax.process import ROLE_NUMBERS, process_rng
from apex_jax.run.evaluations import FILE_NAME, return_text, spread
from apex_jax.run.metric_files import append_line
from apex_jax.run.metrics import EVALUATED_INFO
from apex_jax.types import SegmentSpec

_log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """Result of full games, with raw rewards."""

    config: Config
    returns: np.ndarray  # float64[episodes]
    updates: int  # of the weights
    environment_steps: int  # of the whole run, at those updates
    seconds: float  # that the games took
    numbers: np.ndarray | None = None  # float64[episodes, K] of the K names in `metrics.info`, at the end of the games

    @property
    def info(self) -> dict[str, np.ndarray]:
        """The numbers of the games by their name, float64[episodes]; NaN: the game has none."""
        return {} if self.numbers is None else dict(zip(self.config.metrics.info, self.numbers.T, strict=True))

    @property
    def frames(self) -> int:
        """Emulator frames of the environment steps."""
        return self.environment_steps * self.config.environment.frame_skip

    def values(self) -> dict[str, float]:
        """Returns the evaluation under the tags of `apex_jax.run.metrics.TAGS`."""
        mean = float(self.returns.mean())
        values: dict[str, float] = {
            "eval/episodic_return": mean,
            "eval/episodic_return_median": float(np.median(self.returns)),
            **{f"eval/episodic_return_{name}": value for name, value in spread(self.returns).items()},
            "eval/episodes": len(self.returns),
            "eval/seconds": self.seconds,
            "eval/updates": self.updates,
            "eval/frames": self.frames,
        }
        for name, numbers in self.info.items():
            if np.isfinite(numbers).any():
                values[f"{EVALUATED_INFO}{name}"] = float(np.nanmean(numbers))
        score = human_normalized_score(self.config.environment.task, mean)
        return values if score is None else values | {"eval/human_normalized_score": score}

    def describe(self) -> str:
        """Returns the evaluation as one line."""
        task, episodes, values = self.config.environment.task, len(self.returns), self.values()
        text = (
            f"{task}: mean return {return_text(values['eval/episodic_return'])},"
            f" median {return_text(values['eval/episodic_return_median'])},"
            f" lowest {self.returns.min():g}, highest {self.returns.max():g},"
            f" standard deviation {return_text(values['eval/episodic_return_standard_deviation'])}"
            f" over {episodes} game{'s' * (episodes != 1)}"
        )
        if (score := values.get("eval/human_normalized_score")) is not None:
            text += f", human-normalised {score:.0%}"
        return f"{text}, after {self.updates:,} updates and {self.frames:,} frames"

    def store(self, run_directory: str, exploration: float) -> None:
        """Appends the returns of all games to the run's evaluations."""
        line = {
            "time": time.time(),  # unix seconds
            "updates": self.updates,
            "frames": self.frames,
            "exploration": exploration,
            "seed": self.config.seed,
            "seconds": self.seconds,
            "mean": float(self.returns.mean()),
            **spread(self.returns),
            "returns": self.returns.tolist(),
            "info": {
                name: [number if np.isfinite(number) else None for number in numbers.tolist()]
                for name, numbers in self.info.items()
            },
        }
        try:
            append_line(Path(run_directory, FILE_NAME), json.dumps(line).encode() + b"\n")
        except OSError as error:  # not fatal: the run directory of another user may be read-only
            _log.warning("the games' returns are not kept: %s", error)


class Evaluator:
    """Plays `evaluator.episodes` games in parallel, exactly one per environment; the caller closes the environments.

    Counting the first games to end instead would bias the result towards short, lost games.
    """

    def __init__(
        self,
        config: Config,
        spec: SegmentSpec,
        algorithm: Algorithm,
        filmed: bool = False,
        beat: Callable[[], None] = lambda: None,
    ):
        """`filmed`: whether evaluations can be filmed; `beat`: called at each step."""
        self.beat = beat
        self.steps_per_second = 0.0  # over all games of the current or last evaluation
        self.seconds = 0.0  # of that evaluation
        self.unfinished_games = 0  # of the current evaluation
        self._info = np.zeros((config.evaluator.episodes, len(config.metrics.info)))  # of its games
        self._config, self._settings = config, config.evaluator
        self._algorithm = algorithm
        self._rng = process_rng(config.seed, ROLE_NUMBERS["evaluator"])
        seeds = self._rng.integers(2**31, size=self._settings.episodes)
        # One pool for all evaluations, since EnvPool leaks about 2 MB per closed pool.
        limit = self._settings.max_episode_frames
        self.environment = VectorEnvironment(config, spec, seeds, limit, per_step=1, rendered=filmed)
        self._observation = np.zeros((len(seeds), spec.frame_stack, *spec.frame_shape), spec.frame_dtype)

    def evaluate(
        self, params: Params, cancelled: Callable[[], bool], film: Callable[[np.ndarray | None], None] | None = None
    ) -> np.ndarray | None:
        """Returns the games' returns, float64[episodes]; None if `cancelled` before they all ended.

        All games advance in lockstep, so that equal seeds give equal games. Games that have ended are excluded from
        stepping and from the policy's batch, so that one game stuck for 27,000 steps does not cost ten times as many.
        `film`: receives each screen of the first game, see `VectorEnvironment.render`.
        """
        key = jax.random.key(int(self._rng.integers(2**31)))
        tracker = EpisodeTracker(self._settings.episodes)
        returns = np.full(self._settings.episodes, np.nan)
        playing = np.arange(self._settings.episodes)
        steps, started = 0, time.monotonic()
        for call in itertools.count():
            self.beat()
            for _ in playing:
                step = self.environment.receive()  # of one game
                self._observation[step.env_id] = step.observation
                for episode in tracker.add(step):
                    returns[episode.env_id] = episode.episode_return
                    self._info[episode.env_id] = episode.info
            steps += playing.size
            self.seconds = time.monotonic() - started
            self.steps_per_second = steps / max(1e-9, self.seconds)
            has_ended = ~np.isnan(returns[playing])
            self.environment.leave_out(playing[has_ended])
            playing = playing[~has_ended]
            self.unfinished_games = playing.size
            if not playing.size or cancelled():
                break
            if film is not None and playing[0] == 0:
                film(self.environment.render())
            self.environment.send(self._actions(params, playing, key, call), playing)
        self.unfinished_games = 0
        self.environment.reset()  # for the next evaluation
        return None if playing.size else returns

    def evaluation(self, returns: np.ndarray, weights: Weights) -> Evaluation:
        """Returns the evaluation of the last games; `returns`: what `evaluate` returned for these weights."""
        counts = weights.updates, weights.environment_steps
        return Evaluation(self._config, returns, *counts, self.seconds, self._info.copy())

    def _actions(self, params: Params, playing: np.ndarray, key: jax.Array, call: int) -> np.ndarray:
        """Returns the actions [P, ...] of the games `playing`."""
        rows = np.resize(playing, batch_size(playing.size, self._settings.episodes))  # padded with repeated games
        exploration = np.full(rows.size, self._algorithm.evaluation_exploration, np.float32)
        output = self._algorithm.act(params, self._observation[rows], exploration, key, call)
        return np.asarray(output.action)[: playing.size]


def batch_size(playing: int, episodes: int) -> int:
    """Returns the policy's batch size while `playing` of `episodes` games are running.

    It is `episodes`, or a half, a quarter, ... of it, rounded up, so that few sizes are compiled.
    """
    size = episodes
    while (half := -(-size // 2)) >= playing and half < size:
        size = half
    return size
