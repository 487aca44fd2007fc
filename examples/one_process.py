"""Ape-X (Horgan et al. 2018) on one page: actors, prioritized replay and learner in one loop.

    python examples/one_process.py                       # CartPole, discrete actions: Ape-X DQN, about a minute
    python examples/one_process.py --config pendulum     # Pendulum, continuous actions: Ape-X DPG

Many environments, each with its own exploration rate, fill one replay. The learner draws mostly transitions whose
values it predicts badly, and the actors go on with its new parameters. Here they take turns. `python main.py` runs the
same parts at the same time, each in a process: actor.py, replay_server.py and learner.py of apex_jax/workers/.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # finds apex_jax in a checkout, if it is not installed

from apex_jax.agent.algorithm import Algorithm, Params, copy_params
from apex_jax.agent.frame_store import create_store, insert_segments
from apex_jax.agent.registry import make_algorithm
from apex_jax.agent.segments import SegmentBuilder, spread_first_slots
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.environments.environment import EpisodeTracker, VectorEnvironment, describe
from apex_jax.host.program import CONFIGS
from apex_jax.replay.importance_weights import importance_weights
from apex_jax.replay.replay import Replay
from apex_jax.segment_codec import encode_record
from apex_jax.types import EnvironmentSpec, Segment
from apex_jax.workers.evaluator import Evaluator

CARTPOLE = """
environment.task=CartPole-v1 environment.frame_stack=1 environment.frame_skip=1 environment.reward_clip=0
network.channels=[] network.kernel_sizes=[] network.strides=[] network.hidden_units=128
actor.environments=16 actor.segment_slots=32 algorithm.n_step=3 algorithm.loss=huber
replay.capacity_transitions=50000 replay.min_size_to_sample=1000 replay.samples_per_insert=8 replay.journal=false
learner.batch_size=64 learner.optimizer=adam learner.learning_rate=0.001 learner.max_gradient_norm=10
learner.target_update_interval=500 total_updates=60000 evaluator.episodes=20
"""
REPORT_SECONDS = 3.0


class Actor:
    """Plays in all environments at once, and turns their steps into segments."""

    def __init__(self, config: Config, task: EnvironmentSpec, algorithm: Algorithm, rng: np.random.Generator):
        game, size, spec = config.environment, config.actor.environments, task.spec
        self.environment = VectorEnvironment(config, task, rng.integers(2**31, size=size), game.max_episode_frames)
        # The exploration ladder: epsilon, the probability of a random action, falls from 0.4 in the first environment
        # to 0.0007 in the last one, and stays so for the whole run. (DPG: noise of different scales on the actions.)
        self.exploration = algorithm.exploration(size)
        self.algorithm, self.key = algorithm, jax.random.key(rng.integers(2**31))
        rules = config.algorithm.discount, game.reward_clip, game.life_loss_terminates, spread_first_slots(spec, size)
        self.builder = SegmentBuilder(spec, size, *rules)
        self.tracker, self.returns = EpisodeTracker(size), list[float]()  # of the games that have ended
        self.calls = self.steps = 0

    def act(self, params: Params) -> list[Segment]:
        """Makes one step in each environment; returns the segments that this step completes."""
        step = self.environment.receive()  # new observations, and the rewards of the actions sent before
        output = self.algorithm.act(params, step.observation, self.exploration[step.env_id], self.key, self.calls)
        self.environment.send(np.asarray(output.action), step.env_id)
        self.calls += 1
        self.steps += int(np.count_nonzero(~step.first))  # the first observation of a game follows no action
        self.returns += [episode.episode_return for episode in self.tracker.add(step)]
        # A segment has consecutive frames of one environment, and the n-step transitions that start at them: action,
        # discounted sum of the next n rewards, discount of what follows, and an initial priority. That is the absolute
        # TD error by the q-values in `output`, which the actor has anyway: no second pass of the network.
        return self.builder.add(step, *map(np.asarray, output))


def train(config: Config) -> None:
    """Makes `config.total_updates` updates, then plays full games to evaluate the result; prints the returns."""
    task, rng = describe(config), np.random.default_rng(config.seed)
    spec = task.spec  # shapes and dtypes of the task's observations and actions
    algorithm = make_algorithm(config, spec)  # jitted functions, see apex_jax/agent/dqn.py and dpg.py
    actor = Actor(config, task, algorithm, rng)
    replay = Replay(config, spec, rng)  # a ring of compressed segments, and a sum-tree of their transitions' priorities
    store = create_store(spec, replay.buffer.capacity_segments)  # the same ring as arrays in the learner's memory
    state = algorithm.init(jax.random.key(rng.integers(2**31)))  # online and target parameters, optimizer
    params = copy_params(algorithm.acting_params(state))
    batches, batch_size = config.learner.updates_of_a_call(on_cpu=True), config.learner.batch_size  # of an update call
    updates, started, next_report, beta = 0, time.monotonic(), 0.0, config.replay.importance_sampling_exponent
    while updates < config.total_updates:
        now = time.monotonic() - started
        # 1. Experience: each full segment gets a number and goes to the replay, and to the same slot of the store.
        for segment in actor.act(params):
            record = encode_record(segment, spec, 1, replay.buffer.inserted_segments + 1, produced=actor.steps)
            slot = replay.insert(record, segment.columns, now)
            store = insert_segments(store, np.array([slot]), *jax.tree.map(lambda array: array[None], segment))
        # 2. Learning, as often as `replay.samples_per_insert` allows: so many draws for each transition inserted.
        while updates < config.total_updates and replay.can_sample(batches * batch_size):
            sample = replay.sample(batches, batch_size, now)  # P(i) ~ priority^alpha
            indices, probabilities = (x.reshape(batches, batch_size) for x in (sample.indices, sample.probabilities))
            weights = importance_weights(probabilities, beta)  # ~ P(i)^-beta, at most 1
            # For each batch one step of the optimizer, which brings q(s, a) closer to G: n discounted rewards, plus
            # gamma^n times the target network's value of the online network's next action. The step size falls to 0.
            state, output = algorithm.update(state, store, indices, weights, 1 - updates / config.total_updates)
            priorities = np.ravel(output.priorities)  # the new |G - q(s, a)| of the transitions drawn
            replay.buffer.update_priorities(sample.indices, sample.generations, priorities)
            updates += batches
        # 3. Parameters for the actors: a copy, because the next update overwrites the learner's.
        params = copy_params(algorithm.acting_params(state))
        if now >= next_report and actor.returns:  # of games with exploration
            mean, games = np.mean(actor.returns), len(actor.returns)
            print(f"{now:3.0f} s: {actor.steps:,} steps, {updates:,} updates, mean return {mean:.2f} of {games} games")
            actor.returns, next_report = [], now + REPORT_SECONDS
    returns = Evaluator(config, task, algorithm).evaluate(params, cancelled=lambda: False)
    assert returns is not None  # only a cancelled evaluation has none
    print(f"evaluation: mean return {returns.mean():.2f} of {len(returns)} games")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Ape-X in one process.")
    parser.add_argument("--config", choices=("cartpole", "pendulum"), default="cartpole")
    is_cartpole = parser.parse_args().config == "cartpole"
    train(load(None, CARTPOLE.split()) if is_cartpole else load(CONFIGS / "pendulum.yaml", ["replay.journal=false"]))
