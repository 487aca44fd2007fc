"""The keys of the algorithm and its networks, see `config`."""

from __future__ import annotations

from dataclasses import dataclass

from apex_jax.config.key import JsonObject, key


@dataclass(frozen=True)
class AlgorithmConfig:
    """Ape-X DQN or Ape-X DPG, with n-step returns (Horgan et al. 2018)."""

    name: str = key(
        "auto",
        "auto = the one for the task's actions: dqn for discrete ones, dpg for continuous ones; MODULE:FUNCTION = your"
        " own, see docs/extending.md",
        scope="weights",
    )
    settings: JsonObject = key(
        JsonObject("{}"),
        "a mapping such as {atoms: 51} for an algorithm of your own: json.loads(config.algorithm.settings)",
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
    value_rescaling: bool = key(
        False,
        "DQN: the network learns returns whose size is nearly that of their square root (Pohlen et al. 2018); for"
        " environment.reward_clip=0",
        scope="weights",
    )
    quantiles: int = key(
        0,
        "DQN: quantiles of the returns that the network learns (Dabney et al. 2018); 0 = their mean",
        "",
        0,
        256,
        scope="weights",
    )


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
        False, "vector observations are normalized by their running moments", scope="weights"
    )
