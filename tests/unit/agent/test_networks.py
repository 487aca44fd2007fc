"""The q-network sees every pixel, scaled and in order; all networks have the sizes that their papers give."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from apex_jax.agent.algorithm import Algorithm
from apex_jax.agent.dqn import make_dqn
from apex_jax.agent.networks import Critic, Policy
from apex_jax.config import Config, EnvironmentConfig, EvaluatorConfig, NetworkConfig
from apex_jax.config.load import load
from apex_jax.config.rules import check
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from tests.rigs.agents import PIXELS


def random_params(dqn: Algorithm, scale: float = 1.0) -> Any:
    """Returns parameters float32 of the algorithm's network, every one of them random."""
    rng, like = np.random.default_rng(8), jax.eval_shape(dqn.init, jax.random.key(0)).online_params
    return jax.tree.map(lambda x: (scale * rng.normal(size=x.shape)).astype(np.float32), like)


def q_values(dqn: Algorithm, params: Any, pixels: np.ndarray) -> Any:
    """Returns the q-values `[A]` of one observation."""
    assert dqn.greedy is not None
    return jax.jit(dqn.greedy)(params, jnp.asarray(pixels))["q_values"][0]


def test_network_of_the_paper_has_its_3_3_million_parameters() -> None:
    convolutions = (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (3 * 3 * 64 * 64 + 64)
    streams = 2 * (7 * 7 * 64 * 512 + 512) + (512 + 1) + (512 * 6 + 6)  # 84 -> 20 -> 9 -> 7 pixels
    params = jax.eval_shape(make_dqn(Config(), PIXELS).init, jax.random.key(0)).online_params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == convolutions + streams == 3_293_863


def normalized(x: np.ndarray, norm: dict[str, np.ndarray]) -> np.ndarray:
    """Returns layer normalization of one vector or image over all its elements."""
    scaled = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
    return scaled * np.asarray(norm["scale"]) + np.asarray(norm["bias"])


@pytest.mark.parametrize(("dueling", "layer_norm"), [(True, True), (False, True), (True, False)])
def test_pixels_become_0_to_1_frames_channels_and_layer_norm_is_of_last_convolution_and_hidden_layers_before_relus(
    dueling: bool, layer_norm: bool
) -> None:
    sizes = {"channels": (3, 2), "kernel_sizes": (3, 1), "strides": (2, 1)}
    config = NetworkConfig(**sizes, hidden_units=8, dueling=dueling, layer_norm=layer_norm)  # type: ignore[arg-type]
    dqn = make_dqn(Config(network=config), PIXELS._replace(frame_shape=(7, 7)))
    params = random_params(dqn)
    layers, pixels = params["params"], np.random.default_rng(8).integers(0, 256, (1, 4, 7, 7), dtype=np.uint8)
    features = np.zeros((3, 3, 2))
    for y in range(3):
        for x in range(3):
            window = pixels[0, :, 2 * y : 2 * y + 3, 2 * x : 2 * x + 3] / 255
            first = np.einsum("fij,ijfc->c", window, layers["Conv_0"]["kernel"]) + layers["Conv_0"]["bias"]
            features[y, x] = np.maximum(first, 0) @ layers["Conv_1"]["kernel"][0, 0] + layers["Conv_1"]["bias"]
    torso = np.maximum(normalized(features, layers["torso_norm"]) if layer_norm else features, 0).ravel()
    hidden = np.split(torso @ layers["hidden"]["kernel"] + layers["hidden"]["bias"], 1 + dueling)
    if layer_norm:
        norms = [{name: x[stream] for name, x in layers["hidden_norm"].items()} for stream in range(1 + dueling)]
        hidden = [normalized(x, norm) for x, norm in zip(hidden, norms, strict=True)]
    names = ["value", "advantage"] if dueling else ["q"]
    streams = [np.maximum(x, 0) for x in hidden]
    heads = [x @ layers[name]["kernel"] + layers[name]["bias"] for x, name in zip(streams, names, strict=True)]
    q = heads[0] + heads[1] - heads[1].mean() if dueling else heads[0]
    np.testing.assert_allclose(q_values(dqn, params, pixels), q, rtol=1e-4, atol=1e-4)


def convolved(x: np.ndarray, layer: dict[str, np.ndarray]) -> np.ndarray:
    """Returns a convolution of 3 x 3 over an image [H, W, C] with zeros around it, so that its size stays."""
    around = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    rows, columns, _ = x.shape
    shifted = [around[i : i + rows, j : j + columns] @ layer["kernel"][i, j] for i in range(3) for j in range(3)]
    return sum(shifted) + layer["bias"]


def halved(x: np.ndarray) -> np.ndarray:
    """Returns maxima of 3 x 3 pixels at every second one; with an even side, windows begin at the first pixel."""
    before = [x.shape[axis] % 2 for axis in (0, 1)]
    around = np.pad(x, ((before[0], 2), (before[1], 2), (0, 0)), constant_values=-np.inf)
    rows, columns = (-(-side // 2) for side in x.shape[:2])
    return np.array(
        [[around[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max(axis=(0, 1)) for j in range(columns)] for i in range(rows)]
    )


@pytest.mark.parametrize(("size", "layer_norm"), [(12, True), (28, False), (45, True)])
def test_impala_torso_equals_its_numpy_twin(size: int, layer_norm: bool) -> None:
    config = NetworkConfig(torso="impala", channels=(2, 3), hidden_units=8, dueling=False, layer_norm=layer_norm)
    dqn = make_dqn(Config(network=config), PIXELS._replace(frame_shape=(size, size)))
    params = random_params(dqn, scale=0.3)
    layers, pixels = params["params"], np.random.default_rng(8).integers(0, 256, (1, 4, size, size), dtype=np.uint8)
    x = np.moveaxis(pixels[0], 0, 2) / 255
    convolutions = iter([layers[f"Conv_{i}"] for i in range(10)])
    for _ in config.channels:
        x = halved(convolved(x, next(convolutions)))
        for _ in range(2):
            inner = convolved(np.maximum(x, 0), next(convolutions))
            x = x + convolved(np.maximum(inner, 0), next(convolutions))
    x = np.maximum(normalized(x, layers["torso_norm"]) if layer_norm else x, 0)
    edges = [(i * len(x) // 6, -(-(i + 1) * len(x) // 6)) for i in range(6)]
    torso = np.array([[x[a:b, c:d].max(axis=(0, 1)) for c, d in edges] for a, b in edges]).ravel()
    hidden = torso @ layers["hidden"]["kernel"] + layers["hidden"]["bias"]
    norm = {name: value[0] for name, value in layers["hidden_norm"].items()} if layer_norm else None
    hidden = np.maximum(normalized(hidden, norm) if norm else hidden, 0)
    q = hidden @ layers["q"]["kernel"] + layers["q"]["bias"]
    np.testing.assert_allclose(q_values(dqn, params, pixels), q, rtol=1e-3, atol=1e-4)


def test_impala_torso_of_double_width_has_the_sizes_of_its_paper_and_six_by_six_outputs() -> None:
    config = Config(network=NetworkConfig(torso="impala"))  # channels 32, 64, 64: twice the paper's
    params = jax.eval_shape(make_dqn(config, PIXELS).init, jax.random.key(0)).online_params["params"]
    shapes = [params[f"Conv_{i}"]["kernel"].shape for i in range(15)]
    assert shapes[:5] == [(3, 3, 4, 32)] + 4 * [(3, 3, 32, 32)]
    assert shapes[5:10] == [(3, 3, 32, 64)] + 4 * [(3, 3, 64, 64)]
    assert shapes[10:] == 5 * [(3, 3, 64, 64)]
    assert params["hidden"]["kernel"].shape == (6 * 6 * 64, 2 * 512)


def test_policy_and_critic_have_the_sizes_of_the_paper_and_the_action_joins_at_the_second_layer() -> None:
    config, key, x, a = NetworkConfig(), jax.random.key(0), jnp.zeros((1, 24)), jnp.zeros((1, 6))
    policy, critic = jax.eval_shape(Policy(config, 6).init, key, x), jax.eval_shape(Critic(config).init, key, x, a)
    kernels = [[leaf.shape for leaf in jax.tree.leaves(each) if leaf.ndim > 1] for each in (policy, critic)]
    assert sorted(kernels[0]) == [(24, 300), (200, 6), (300, 200)]
    assert sorted(kernels[1]) == [(24, 400), (300, 1), (400 + 6, 300)]


def unseen(config: Config) -> tuple[list[int], list[int]]:
    """Returns which of the outermost 8 rows, and columns, can be inverted in all frames and the q-value stays."""
    size, rng = config.environment.frame_size, np.random.default_rng(10)
    frames = rng.integers(0, 256, (4, size, size), dtype=np.uint8)
    outermost = [*range(8), *range(size - 8, size)]
    inverted = np.repeat(frames[None], 1 + 2 * len(outermost), axis=0)
    for k, i in enumerate(outermost, 1):
        inverted[k, :, i] ^= 255
        inverted[k + len(outermost), :, :, i] ^= 255
    dqn = make_dqn(config, PIXELS._replace(frame_shape=(size, size)))
    params = dqn.init(jax.random.key(0)).online_params
    q = np.asarray(dqn.act(params, inverted, jnp.zeros(len(inverted)), jax.random.key(0), 0).bootstrap_value)
    stays = np.isclose(q[1:], q[0], rtol=1e-6, atol=0).reshape(2, -1)
    rows, columns = ([i for i, same in zip(outermost, line, strict=True) if same] for line in stays)
    return rows, columns


@pytest.mark.long
@pytest.mark.parametrize("name", ["pong_cpu", "atari_cpu", "atari", "paper"])
def test_network_sees_every_pixel(name: str) -> None:
    assert unseen(load(CONFIGS / f"{name}.yaml")) == ([], [])


@pytest.mark.long
def test_geometry_is_refused_with_the_number_of_unseen_rows_and_columns() -> None:
    network = NetworkConfig(channels=(8, 8, 8), kernel_sizes=(4, 4, 3), strides=(3, 2, 1), hidden_units=8)
    config = Config(environment=EnvironmentConfig(frame_size=42), network=network)
    assert unseen(config) == ([*range(37, 42)], [*range(37, 42)])
    with pytest.raises(UsageError, match=r"the last 5 rows and columns of 42 pixels unseen.*frame_size=37 or 43"):
        check(config)
    check(dataclasses.replace(config, evaluator=EvaluatorConfig(checkpoint="runs/trained-before-it-was-refused")))
    check(dataclasses.replace(config, network=dataclasses.replace(network, unseen_pixels=True)))
    for size in (37, 43):
        fits = dataclasses.replace(config, environment=EnvironmentConfig(frame_size=size))
        check(fits)
        assert unseen(fits) == ([], [])
