"""The configuration of a run: typed keys, each documented once and checked before any process starts.

`Config` and its groups are frozen dataclasses. The field of each key holds its meaning, unit and range; `load` and
`command_line` build `--help`, `--print-config`, the checks and the error messages from them.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

GPU_UPDATES_PER_CALL = 8  # for learner.updates_per_call=0 on a GPU, which would otherwise wait for Python
IMPALA_OUTPUTS = 6  # rows and columns that max-pooling leaves of the impala torso's output, whatever the frame's size
CPU_TRANSITIONS_PER_CALL = 256  # for updates_per_call=0 on a CPU: as many updates as fit in this number, but 1 to 8
GYM_MUJOCO = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"),
    *("Pusher", "Reacher", "Swimmer", "Walker2d"),
)  # EnvPool's other tasks whose names end in -v5, beside the Atari games

MAX_COMPATIBILITY_KEY_BYTES = 2**15  # in the messages with which processes join each other


class JsonObject(str):
    """The text of a JSON object; in files and on the command line, a mapping of any names to values."""

    __slots__ = ()


def names_code(value: str) -> bool:
    """Returns whether the value of `algorithm.name` or `network.name` names code of the user, MODULE:NAME."""
    return ":" in value


@dataclass(frozen=True)
class Key:
    """The help text of a key, the limits of its values, and which processes and files must have the same value.

    `scope`: "run": all roles of a run, and its files; "weights": the learner, receivers of its weights and checkpoints;
    "checkpoint": a learner and the checkpoint from which it resumes; empty: none.
    """

    text: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    scope: str = ""


def key(default: Any, *meaning: Any, **more: Any) -> Any:
    """Returns a dataclass field whose metadata holds its `Key`, of the other arguments."""
    return field(default=default, metadata={"key": Key(*meaning, **more)})


@dataclass(frozen=True)
class EnvironmentConfig:
    """The game, and what is done to its frames and rewards."""

    task: str = key(
        "Pong-v5",
        "EnvPool task: any Atari game (Breakout-v5, ...), CartPole-v1, MountainCar-v0, Catch-v0, and with continuous"
        " actions DM control (WalkerWalk-v1, ...), Gym MuJoCo (HalfCheetah-v4, ...), Pendulum-v1; or one of Gymnasium:"
        " gymnasium:ID, gymnasium:MODULE:ID (of a module that registers it), gymnasium:MODULE:FUNCTION; or a batch of"
        " them, a gymnasium.vector.VectorEnv: vector:MODULE:FUNCTION; or one written in JAX: jax:PACKAGE:ID,"
        " jax:MODULE:FUNCTION",
        scope="run",
    )
    settings: JsonObject = key(
        JsonObject("{}"),
        "gymnasium:, jax: and gymnax: tasks: arguments of the environment, a mapping such as {gravity: -5.0}",
        scope="run",
    )
    observation_layout: str = key(
        "auto",
        "the same tasks: axes of an observation that is an image: H height, W width, C colors or stacked frames;"
        " vector = it is no image; auto = by its shape and bounds, which the run prints at its start",
        choices=("auto", "vector", "HW", "HWC", "CHW", "HWCC", "CHWC", "CCHW"),
        scope="run",
    )
    python: str = key(
        "",
        "gymnasium: tasks: path of the Python, 3.8 or later, in which environments run; empty = this one",
    )
    own_processes: bool = key(
        True,
        "gymnasium: tasks: each environment runs in a process of its own, beside the actor; false: in the actor's,"
        " which is faster if a step takes less than some 50 microseconds",
    )
    frame_size: int = key(84, "height and width of an Atari frame", "pixels", 20, 210, scope="run")
    frame_stack: int = key(4, "newest frames or vectors that make an observation", "frames", 1, 16, scope="run")
    frame_skip: int = key(4, "emulator frames an action is repeated for", "frames", 1, 16, scope="run")
    noop_max: int = key(30, "an episode starts with 1 to this many no-ops", "frames", 1, 100)
    fire_reset: bool = key(True, "an episode starts with FIRE, too, if the game has that action")
    repeat_action_probability: float = key(
        0.0, "sticky actions: probability that the emulator repeats the previous action", "", 0, 1
    )
    life_loss_terminates: bool = key(True, "a lost life ends the n-step return (the episode goes on)", scope="run")
    reward_clip: float = key(1.0, "training rewards are clipped to [-this, this]; 0 = never", "", 0, 1e9, scope="run")
    max_episode_frames: int = key(50_000, "time limit of a training episode", "frames", 16, 10**9)

    @property
    def is_atari(self) -> bool:
        """Whether the name of the task is one of EnvPool's Atari games."""
        name, _, version = self.task.rpartition("-")
        return not self.has_spaces and version == "v5" and name not in GYM_MUJOCO

    @property
    def is_gymnasium(self) -> bool:
        """Whether the task is an environment of Gymnasium, not of EnvPool."""
        return self.task.startswith("gymnasium:")

    @property
    def is_vector(self) -> bool:
        """Whether the task is a batch of environments of Gymnasium."""
        return self.task.startswith("vector:")

    @property
    def is_jax(self) -> bool:
        """Whether the task is an environment written in JAX."""
        return self.task.startswith(("gymnax:", "jax:"))

    @property
    def has_spaces(self) -> bool:
        """Whether spaces of Gymnasium describe the task, which may be the user's, and not EnvPool."""
        return self.is_gymnasium or self.is_vector or self.is_jax


@dataclass(frozen=True)
class AlgorithmConfig:
    """Ape-X DQN or Ape-X DPG, with n-step returns (Horgan et al. 2018)."""

    name: str = key(
        "auto",
        "auto = the one for the task's actions: dqn for discrete ones, dpg for continuous ones; MODULE:FUNCTION = your"
        " own",
        scope="weights",
    )
    settings: JsonObject = key(
        JsonObject("{}"),
        "a mapping such as {bins: 51} for an algorithm of your own: json.loads(config.algorithm.settings)",
        scope="weights",
    )
    n_step: int = key(3, "rewards summed before the bootstrap", "steps", 1, 64, scope="run")
    discount: float = key(0.99, "gamma, per step", "", 0, 1, scope="run")
    double_q: bool = key(True, "DQN: the online network chooses the bootstrap action, the target network values it")
    loss: str = key("squared", "form of the loss on the TD error", choices=("squared", "huber"))
    action_gradient_clip: float = key(
        1.0, "DPG: the elements of the critic's action gradient are clipped to [-this, this]; 0 = never", "", 0, 1e9
    )
    twin_critics: bool = key(
        False,
        "DPG: two critics, of which the smaller value is the target (Fujimoto et al. 2018); for tasks that terminate",
        scope="weights",
    )
    random_shift: int = key(
        4, "DPG: a batch's images are shifted at random by up to this (Yarats et al. 2022); 0 = never", "pixels", 0, 16
    )
    munchausen: bool = key(
        False,
        "DQN: soft target with the log-probability of the action added to the reward (Vieillard et al. 2020), instead"
        " of double_q",
        scope="weights",
    )
    quantiles: int = key(
        0, "DQN: quantiles of the returns to learn (Dabney et al. 2018); 0 = the mean", "", 0, 256, scope="weights"
    )
    atoms: int = key(
        0, "DQN: returns whose probabilities to learn (Bellemare et al. 2017); 0 = off", "", 0, 512, scope="weights"
    )
    lowest_return: float = key(0.0, "the first atom: the least discounted return", "", -1e9, 1e9, scope="weights")
    highest_return: float = key(100.0, "the last atom", "", -1e9, 1e9, scope="weights")


@dataclass(frozen=True)
class NetworkConfig:
    """Convolutions (pixels only). DQN: one hidden layer a stream, q-values. DPG: an encoder's layer, policy, critic."""

    name: str = key(
        "auto",
        "auto = the one described by the keys below; MODULE:CLASS = a Flax module of your own in place of QNetwork;"
        " DPG: MODULE:CLASS,CLASS = in place of Policy and Critic (apex_jax/agent/networks.py)",
        scope="weights",
    )
    channels: tuple[int, ...] = key((32, 64, 64), "output channels of each convolution", "", 1, 4096, scope="weights")
    kernel_sizes: tuple[int, ...] = key(
        (8, 4, 3), "kernel height and width of each convolution", "pixels", 1, 64, scope="weights"
    )
    strides: tuple[int, ...] = key((4, 2, 1), "stride of each convolution", "pixels", 1, 16, scope="weights")
    hidden_units: int = key(512, "units of the hidden layer of each stream", "", 1, 65536, scope="weights")
    dueling: bool = key(True, "separate value and advantage streams (Wang et al. 2016)", scope="weights")
    unseen_pixels: bool = key(False, "kernels and strides may leave pixels unseen, in between or at two edges")
    torso: str = key(
        "convolutions",
        "of pixels; impala = for each of network.channels a convolution, max-pooling and two residual blocks (Espeholt"
        " et al. 2018), for GPUs, not measured; kernel_sizes and strides do not apply",
        choices=("convolutions", "impala"),
        scope="weights",
    )
    policy_units: tuple[int, ...] = key(
        (300, 200), "DPG: units of each hidden layer of the policy", "", 1, 65536, scope="weights"
    )
    critic_units: tuple[int, ...] = key(
        (400, 300),
        "DPG: units of each hidden layer of the critic; the action joins at the second (layer_norm: first)",
        "",
        1,
        65536,
        scope="weights",
    )
    layer_norm: bool = key(
        False,
        "layer normalization; DQN: of the last convolution and of the hidden layers; DPG: in hidden layers after the"
        " first, which are residual blocks (Lee et al. 2024)",
        scope="weights",
    )
    normalize_observations: bool = key(
        False, "numbers of observations are normalized by their running moments", scope="weights"
    )


@dataclass(frozen=True)
class ActorConfig:
    """Acting: environments, exploration, segments."""

    processes: int = key(0, "actors of --role local; 0 = one for five cores with a GPU, else one", "", 0, 256)
    environments: int = key(32, "environments of one actor process", "", 1, 4096)
    environments_per_step: int = key(
        0, "environments acted on at once, while the others step; 0 = half of them", "", 0, 4096
    )
    environment_threads: int = key(0, "EnvPool threads; 0 = one a core, at most one an environment", "", 0, 1024)
    ladder_size: int = key(
        0, "environments of the fleet, the exploration ladder's length; 0 = processes x environments", "", 0, 2**20
    )
    base_epsilon: float = key(0.4, "DQN: epsilon of environment i of N is base^(1 + exponent i / (N - 1))", "", 0, 1)
    epsilon_exponent: float = key(7.0, "spread of the ladder, see base_epsilon", "", 0, 100)
    largest_noise: float = key(
        0.3,
        "DPG: Gaussian noise on the actions, of which [-1, 1] is the range, has in environment i of N the standard"
        " deviation largest_noise (smallest_noise / largest_noise)^(i / (N - 1))",
        "",
        1e-6,
        10,
    )
    smallest_noise: float = key(0.3, "DPG: the other end of the ladder, see largest_noise", "", 1e-6, 10)
    segment_slots: int = key(64, "frame slots of a segment, the unit an actor sends", "frames", 8, 4096, scope="run")
    max_outstanding_segments: int = key(
        64,
        "segments sent but not acknowledged; acting pauses once as many again, or one per environment, are queued",
        "",
        1,
        4096,
    )
    overflow: str = key(
        "wait",
        "when the replay takes no segments and the actor's queues are full (see max_outstanding_segments): wait, or"
        " drop (and count) the oldest segment not yet sent",
        choices=("wait", "drop"),
    )
    device: str = key("cpu", "where the policy runs", choices=("auto", "cpu", "gpu"))

    @property
    def batch_size(self) -> int:
        """Environments acted on at once; half by default, so that no core waits: 5 to 15 % more steps than with all."""
        return self.environments_per_step or -(-self.environments // 2)


@dataclass(frozen=True)
class ReplayConfig:
    """Prioritized replay (Schaul et al. 2016)."""

    capacity_transitions: int = key(2_000_000, "oldest segments leave when it is full", "transitions", 64, 2**30)
    min_size_to_sample: int = key(50_000, "learning starts at this many", "transitions", 1, 2**30)
    priority_exponent: float = key(0.6, "alpha: P(i) is proportional to priority^alpha; 0 = uniform replay", "", 0, 10)
    importance_sampling_exponent: float = key(0.4, "beta: weight (N P(i))^-beta over the batch's largest", "", 0, 10)
    initial_priority: str = key(
        "actor",
        "of a new transition: the error its actor computed (Ape-X), or the maximum so far (Schaul et al. 2016)",
        choices=("actor", "maximum"),
    )
    samples_per_insert: float = key(
        0.0, "transitions drawn per transition stored; the faster side waits; 0 = no limit", "", 0, 1e6
    )
    error_buffer: float = key(
        0.1, "how far samples_per_insert may stray, as a share of min_size_to_sample", "", 0.001, 1e6
    )
    journal: bool = key(
        True, "each segment is written to replay/ in the run directory before its actor drops it; a restart resumes"
    )
    snapshot_interval_seconds: float = key(
        60.0,
        "priorities and counters are written beside the segments, and all is flushed to the disk, every",
        "seconds",
        1,
        86_400,
    )
    columns: str = key(
        "",
        "the replay server alone, for items of programs of your own: NAME:DTYPE or NAME:DTYPE[SHAPE]"
        " of each column, as in 'tokens:int32[512], reward:float32'; empty = experience of environment.task",
        scope="run",
    )


@dataclass(frozen=True)
class LearnerConfig:
    """Learning: batches, optimizer, target network, publishing of weights, checkpoints."""

    batch_size: int = key(512, "transitions of an update", "transitions", 1, 65536)
    updates_per_call: int = key(
        0, "updates in one device call; 0 = 8, on a CPU those of at most 256 transitions", "updates", 0, 256
    )
    prefetch_batches: int = key(16, "batches drawn ahead of the two calls in flight", "batches", 1, 4096)
    optimizer: str = key("rmsprop", "rmsprop is the centered form", choices=("rmsprop", "adam"), scope="checkpoint")
    learning_rate: float = key(0.00025 / 4, "step size", "", 0, 10)
    final_learning_rate_share: float = key(
        1.0, "the step size falls linearly to this share of it as the run nears its limit; 1 = constant", "", 0, 1
    )
    learning_rate_decay_start: float = key(0.0, "share of the run after which the step size falls", "", 0, 0.99)
    rmsprop_decay: float = key(0.95, "decay of both moments of RMSProp", "", 0, 1)
    optimizer_epsilon: float = key(
        1.5e-7, "added to the variance inside the root (RMSProp), beside the root (Adam)", "", 0, 1
    )
    max_gradient_norm: float = key(40.0, "gradients are scaled down to this global norm; 0 = never", "", 0, 1e9)
    target_update_interval: int = key(
        2_500, "the target network is a copy of the online one every", "updates", 1, 10**9
    )
    publish_interval_seconds: float = key(1.0, "new weights are published at most every", "seconds", 0.01, 3600)
    checkpoint_interval_seconds: float = key(
        300.0, "a checkpoint is saved every; a run's first one after at most 45 of learning", "seconds", 1, 10**6
    )
    checkpoints_kept: int = key(3, "newest checkpoints kept", "", 1, 1000)
    failed_checkpoints_limit: int = key(
        0, "the run fails once so many checkpoints in a row could not be saved; 0 = it goes on learning", "", 0, 1000
    )
    compute_dtype: str = key(
        "auto",
        "dtype of the network's activations; auto = float32; bfloat16 is slower on CPUs, and faster on GPUs",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = key("auto", "where the learner runs; auto = GPU if there is one", choices=("auto", "cpu", "gpu"))

    @property
    def largest_sample(self) -> int:
        """Largest number of transitions drawn at once, on any device."""
        return (self.updates_per_call or GPU_UPDATES_PER_CALL) * self.batch_size

    def updates_of_a_call(self, on_cpu: bool) -> int:
        """Returns the number of updates in one device call; chooses it by the device if `updates_per_call` is 0.

        On a CPU, an update of a small batch takes less time than Python needs around a call, so that several updates
        share a call. Large batches get one update per call, to keep calls short.
        """
        few = max(1, min(CPU_TRANSITIONS_PER_CALL // self.batch_size, GPU_UPDATES_PER_CALL))
        return self.updates_per_call or (few if on_cpu else GPU_UPDATES_PER_CALL)


# The groups about evaluation, links, copies and metrics; none affects learning ----------------------------------------


@dataclass(frozen=True)
class EvaluatorConfig:
    """Full games with the newest weights, or with those of a checkpoint."""

    episodes: int = key(10, "full games of an evaluation, played side by side", "episodes", 1, 1000)
    epsilon: float = key(0.00164, "DQN: probability of a random action", "", 0, 1)
    interval_updates: int = key(
        0, "processes=one: updates between evaluations; 0 = a tenth of total_updates, else 5,000", "updates", 0, 10**12
    )
    interval_seconds: float = key(
        60.0, "pause before an evaluation: since the last one, or since the run started", "seconds", 0, 10**6
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
    """Numbers of one's own, and where metrics go."""

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


# The whole ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """The configuration of a run; `compatibility_key` holds the values that all roles of the fleet must share."""

    seed: int = key(1, "every process derives its own random numbers from this one", "", 0, 2**31 - 1)
    processes: str = key(
        "many",
        "of a run on this machine: many = one for each role; one = they take turns in this process, and two runs with"
        " one seed are equal bit for bit, if no limit is in minutes",
        choices=("many", "one"),
    )
    run_directory: str = key(
        "", "checkpoints, metrics and logs go here; empty = runs/<task>-<seed>; a second start resumes"
    )
    total_environment_frames: int = key(
        0, "the run ends after this many emulator frames of all actors; 0 = no limit", "frames", 0, 10**15
    )
    total_minutes: float = key(
        0.0, "the run ends this long after its first update, without pauses; 0 = no limit", "minutes", 0, 10**7
    )
    total_updates: int = key(
        0, "the run ends after this many learner updates, counted a call at a time; 0 = no limit", "updates", 0, 10**12
    )
    away_limit_seconds: float = key(
        0.0,
        "a process exits with code 1 once its server has been away this long; 0 = looks for it for ever",
        "seconds",
        0,
        10**7,
    )
    page_port: int = key(
        0, "a local run shows itself at http://127.0.0.1:PORT, this one; 0 = a free one, -1 = no page", "", -1, 65535
    )
    metrics_interval_seconds: float = key(5.0, "metrics are written every", "seconds", 0.1, 3600)
    environment: EnvironmentConfig = EnvironmentConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    network: NetworkConfig = NetworkConfig()
    actor: ActorConfig = ActorConfig()
    replay: ReplayConfig = ReplayConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    addresses: AddressConfig = AddressConfig()
    security: SecurityConfig = SecurityConfig()
    storage: StorageConfig = StorageConfig()
    metrics: MetricsConfig = MetricsConfig()

    @property
    def directory(self) -> str:
        """The run directory; if none is configured, runs/<task>-<seed>, or runs/replay-<seed> for items."""
        task = re.sub("[:/]", "-", self.environment.task)
        return self.run_directory or f"runs/{'replay' if self.replay.columns else task}-{self.seed}"

    @property
    def ladder_size(self) -> int:
        """Length N of the exploration ladder: environments of the whole fleet.

        Only a local run chooses `actor.processes`; on a fleet, 0 counts as one actor.
        """
        return self.actor.ladder_size or (self.actor.processes or 1) * self.actor.environments

    @property
    def compatibility_key(self) -> str:
        """Text of the values that all roles of a run must share; a peer that differs is rejected with the reason."""
        if self.replay.columns:  # spaces are removed, because they separate the words of the text
            return f"columns={''.join(self.replay.columns.split())} segment_slots={self.actor.segment_slots}"
        return self._values_of("run")

    @property
    def weights_compatibility_key(self) -> str:
        """Text of the values that the learner and a receiver of its weights must share."""
        return self._values_of("run", "weights")

    @property
    def checkpoint_compatibility_key(self) -> str:
        """Text of the values that a run must share with the checkpoint from which it resumes.

        It omits the algorithm if the name is "auto", which depends on the environment: see `agent.registry.resolved`.
        """
        return self._values_of("run", "weights", "checkpoint")

    def _values_of(self, *scopes: str) -> str:
        """Returns `name=value` of each key of these scopes, separated by spaces."""
        words = []
        for group in (item.name for item in dataclasses.fields(self) if "key" not in item.metadata):
            members = getattr(self, group)
            for item in dataclasses.fields(members):
                value, scoped = getattr(members, item.name), item.metadata["key"]
                if scoped.scope in scopes and (group, item.name, value) != ("algorithm", "name", "auto"):
                    words.append(f"{compatibility_name(f'{group}.{item.name}')}={_word(value)}")
        return " ".join(words)

    @property
    def fix_of_divergence(self) -> str:
        """What the user can do if learning diverges."""
        if self.learner.optimizer_epsilon == 0:
            return "raise learner.optimizer_epsilon (now 0: a gradient of zero is divided by zero)"
        has_another_loss = self.algorithm.loss == "huber" or self.algorithm.quantiles or self.algorithm.atoms
        huber = "" if has_another_loss else " or set algorithm.loss=huber"
        return f"lower learner.learning_rate (now {self.learner.learning_rate:g}){huber}"

    def replace(self, **changes: Any) -> Config:
        """Returns a copy with these top-level fields replaced."""
        return dataclasses.replace(self, **changes)


def compatibility_name(key: str) -> str:
    """Returns the name of a key in a compatibility key: the part after the dot, if no other key there has it."""
    others = {"network.name": "network", "algorithm.settings": "algorithm_settings"}
    return others.get(key, key.rpartition(".")[2])


def _word(value: Any) -> str:
    """Returns a value as it stands in a compatibility key."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
