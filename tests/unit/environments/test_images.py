"""Images of Gymnasium's environments: which spaces are images, and what becomes of their axes and elements."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

from apex_jax.environments import gymnasium_tasks
from apex_jax.environments.environment import describe, log_reading
from apex_jax.environments.gymnasium_tasks import make
from apex_jax.environments.images import image_specs, picture, reading
from apex_jax.environments.task import leaves_of
from apex_jax.host.errors import UsageError
from apex_jax.policy import Policy
from tests.rigs import environments
from tests.unit.environments.test_gymnasium_tasks import OWN, Seen, config

COLOR = spaces.Box(0, 255, (64, 48, 3), np.uint8)


def image_of(space: spaces.Space[Any], layout: str = "auto") -> Any:
    """Returns how a space of one part is read as images, None if it is no image."""
    return next(iter(image_specs("A", leaves_of(space), layout)), None)


@pytest.mark.parametrize(("shape", "layout", "frame"), [
    ((84, 84), "HW", (84, 84)),
    ((210, 160, 3), "HWC", (210, 160, 3)),
    ((7, 7, 3), "HWC", (7, 7, 3)),
    ((3, 64, 48), "CHW", (64, 48, 3)),
    ((4, 64, 64), "CHW", (64, 64, 4)),  # FrameStackObservation over grey
    ((3, 64, 48, 3), "CHWC", (64, 48, 9)),  # the same over color
    ((4, 3, 64, 48), "CCHW", (64, 48, 12)),  # over channels first
    ((4, 84, 84, 1), "CHWC", (84, 84, 4)),
    ((64, 48, 3, 4), "HWCC", (64, 48, 12)),
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "high"), [(np.uint8, 255), (np.float32, 1), (np.float64, 255), (np.int64, 255)])
def test_height_and_width_are_the_two_neighbouring_axes_that_are_long(
    shape: tuple[int, ...], layout: str, frame: tuple[int, ...], dtype: Any, high: int
) -> None:
    image = image_of(spaces.Box(0, high, shape, dtype))
    if dtype != np.uint8 and min(frame[:2]) < 16:
        assert image is None, "a small array is more often a table"
        return
    assert image is not None
    assert (image.layout, image.frame_shape) == (layout, frame)


@pytest.mark.parametrize("space", [
    spaces.Box(0, 255, (9,), np.uint8),
    spaces.Box(-np.inf, np.inf, (64, 64, 3), np.float32),
    spaces.Box(-5, 5, (64, 64), np.float32),
    spaces.Box(0, 1, (10, 5), np.float32),
    spaces.Dict({"table": spaces.Box(0, 255, (15, 64), np.uint8)}),
])  # fmt: skip
def test_other_observations_are_vectors(space: Any) -> None:
    assert image_of(space) is None
    assert "vectors of 12 numbers" in reading("A", space, (), 12, 0)


def test_frame_holds_each_pixel_with_its_channels_in_their_order() -> None:
    image = image_of(spaces.Box(0, 255, (2, 5, 4, 3), np.uint8), "CHWC")
    assert image is not None
    images = np.random.default_rng(0).integers(256, size=(6, 2, 5, 4, 3), dtype=np.uint8)
    frames = image.frames(images)
    assert frames.shape == (6, 5, 4, 6)
    assert frames.dtype == np.uint8
    for n, y, x in np.ndindex(6, 5, 4):
        np.testing.assert_array_equal(frames[n, y, x], [*images[n, 0, y, x], *images[n, 1, y, x]])


@pytest.mark.parametrize(("low", "high", "dtype"), [(0, 1, np.float32), (-1, 1, np.float64), (0, 1, np.uint8)])
def test_bounds_become_0_and_255(low: float, high: float, dtype: Any) -> None:
    image = image_of(spaces.Box(low, high, (2, 2), dtype), "HW")
    assert image is not None
    np.testing.assert_array_equal(image.frames(np.array([[low, high], [high, low]], dtype)), [[0, 255], [255, 0]])
    if dtype == np.float32:
        every = np.arange(256, dtype=np.uint8).reshape(64, 2, 2)
        np.testing.assert_array_equal(image.frames(every / np.float32(255)), every)


@pytest.mark.parametrize("element", [1.5, -0.1, np.nan])
def test_element_beyond_the_bounds_is_refused(element: float) -> None:
    image = image_of(spaces.Box(0, 1, (16, 16), np.float32))
    assert image is not None
    with pytest.raises(ValueError, match="expected 0 to 1"):
        image.frames(np.full((16, 16), element, np.float32))


def test_layout_of_the_user_replaces_that_of_the_shape() -> None:
    assert image_of(COLOR, "vector") is None
    space = spaces.Box(-1, 1, (3, 12, 12), np.float32)
    image = image_of(space, "CHW")
    assert image is not None
    assert image.frame_shape == (12, 12, 3)
    line = reading("A", space, (image,), 0, 0)
    assert "12 x 12 pixels with 3 channels" in line
    assert "environment.observation_layout=CHW" in line


@pytest.mark.parametrize(("space", "layout", "message"), [
    (COLOR, "CHWC", "environment.observation_layout=CHWC"),
    (spaces.Discrete(3), "HW", r"environment.observation_layout=HW: environment.task=A returns Discrete\(3\)"),
    (spaces.MultiBinary((20, 20)), "HW", "environment.observation_layout=HW"),
    (spaces.Dict(image=COLOR), "HW", "environment.observation_layout=HW"),
    (spaces.Box(-np.inf, np.inf, (64, 64), np.float32), "HW", "observation_layout=HW.*TransformObservation"),
])  # fmt: skip
def test_layout_that_the_space_does_not_have_is_refused(space: Any, layout: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        image_of(space, layout)


@pytest.mark.parametrize(("shape", "high"), [((3, 20, 24), 255), ((2, 20, 24, 3), 255), ((20, 24), 1)])
@pytest.mark.parametrize("stack", [1, 2])
def test_policy_takes_the_images_that_the_environment_returns(shape: tuple[int, ...], high: int, stack: int) -> None:
    arguments = f"environment.settings={{shape: {list(shape)}, high: {high}}}"
    settings = config(f"{OWN}Pixels", arguments, "network.kernel_sizes=[8,4,1]", stack=stack)
    seen = Seen()
    policy = Policy(seen, {}, describe(settings))  # type: ignore[arg-type]
    frame, _ = make(settings.environment.task, settings.environment.settings).reset(seed=1)
    assert frame.shape[:2] == (20, 24)
    assert frame.ravel()[-1] == 255
    observation, _ = environments.Pixels(shape, high=high).reset(seed=1)
    for given in (observation, np.stack([[observation] * stack] * 2) if stack > 1 else observation[None]):
        policy(given)
        for each in seen.stacks:
            np.testing.assert_array_equal(each, [frame] * stack)
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        policy(frame[:10])


GREY = np.arange(12, dtype=np.uint8).reshape(3, 4)


@pytest.mark.parametrize("rendered", [
    GREY,
    GREY[..., None],
    np.stack([GREY] * 3, axis=-1),
    np.stack([GREY] * 3 + [np.full_like(GREY, 9)], axis=-1),
    GREY / 255,
    (GREY / 255).astype(np.float32)[..., None],
])  # fmt: skip
def test_grey_transparent_and_float_pictures_are_shown_in_colour(rendered: np.ndarray) -> None:
    np.testing.assert_array_equal(picture(rendered), np.stack([GREY] * 3, axis=-1))


@pytest.mark.parametrize("rendered", [None, "text", np.zeros(3), np.zeros((3, 4, 2), np.uint8), np.full((3, 4), 2.5)])
def test_anything_else_is_no_picture(rendered: Any) -> None:
    assert picture(rendered) is None


TABLE = spaces.Box(-np.inf, np.inf, (2, 3))
SMALL = spaces.Box(0, 255, (8, 8), np.uint8)
NESTED = spaces.Dict({
    "above": spaces.Dict(table=SMALL, pixels=COLOR),
    "front": spaces.Box(0, 1, (1, 64, 48), np.float32),
    "speed": spaces.Box(-1, 1, (3,)),
    "gear": spaces.Discrete(3),
})  # fmt: skip


def observing(monkeypatch: pytest.MonkeyPatch, space: Any) -> Any:
    """Makes `Observes` return a sample of a space, which is returned."""
    space.seed(2)
    monkeypatch.setattr(environments.Observes, "space", space)
    monkeypatch.setattr(environments.Observes, "value", space.sample())
    return environments.Observes.value


def test_images_of_one_size_are_channels_and_everything_else_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    value = observing(monkeypatch, NESTED)
    adapted = make(f"{OWN}Observes", "{}")
    frame = np.concatenate([value["above"]["pixels"], np.rint(value["front"][0] * 255)[..., None]], axis=2)
    gear = np.arange(3) == value["gear"]
    numbers = np.concatenate([value["above"]["table"].ravel(), gear, value["speed"]])
    for observation in (adapted.reset()[0], adapted.step(0)[0]):
        np.testing.assert_array_equal(observation["frames"], frame)
        np.testing.assert_allclose(observation["numbers"], numbers, rtol=1e-6)
    described = gymnasium_tasks.describe(config(f"{OWN}Observes"))
    assert (described.spec.frame_shape, described.spec.frame_dtype, described.spec.numbers) == (
        (64, 48, 4),
        "uint8",
        70,
    )
    assert "above/pixels, front" in described.reading
    assert "vectors of 70 numbers" in described.reading
    assert described.caution == ""
    as_vectors = gymnasium_tasks.describe(config(f"{OWN}Observes", "environment.observation_layout=vector"))
    assert as_vectors.spec.frame_shape == (64 * 48 * 4 + 70,)


def test_policy_takes_images_and_numbers_as_the_environment_returns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    value = observing(monkeypatch, NESTED)
    expected, seen = make(f"{OWN}Observes", "{}").reset()[0], Seen()
    batch: Any = create_empty_array(NESTED, 2)
    for stack, given in ((1, value), (1, concatenate(NESTED, [value] * 2, batch)), (2, value)):
        described = gymnasium_tasks.describe(config(f"{OWN}Observes", stack=stack))
        Policy(seen, {}, described)(given)  # type: ignore[arg-type]
        for name, part in expected.items():
            np.testing.assert_allclose(seen.stacks[name], [[part] * stack] * len(seen.stacks[name]))
    with pytest.raises(ValueError, match="without above/table, gear, speed; expected above/pixels uint8"):
        Policy(seen, {}, described)({"above": {"pixels": value["above"]["pixels"]}, "front": value["front"]})  # type: ignore[arg-type]


def test_layout_of_the_user_chooses_the_images_of_nested_observations() -> None:
    space = spaces.Dict(large=spaces.Box(0, 1, (17, 100, 100)), small=spaces.Box(0, 255, (9, 9), np.uint8), joint=TABLE)
    for layout, names in (("auto", ["large"]), ("HW", ["small"]), ("CHW", ["large"]), ("vector", [])):
        assert [image.path[0] for image in image_specs("A", leaves_of(space), layout)] == names


@pytest.mark.parametrize("space", [
    spaces.Dict(action_mask=spaces.MultiBinary(2)), spaces.Dict(seen=COLOR, told=spaces.Text(5)),
])  # fmt: skip
def test_observation_of_a_mask_alone_or_of_an_image_with_a_text_is_refused(
    space: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    observing(monkeypatch, space)
    with pytest.raises(UsageError, match="its observations are Dict"):
        gymnasium_tasks.describe(config(f"{OWN}Observes"))


def test_image_of_another_size_is_numbers_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    observing(monkeypatch, spaces.Dict(hand=spaces.Box(0, 255, (32, 32), np.uint8), table=SMALL, head=COLOR))
    described = gymnasium_tasks.describe(config(f"{OWN}Observes"))
    assert (described.spec.frame_shape, described.spec.numbers) == (COLOR.shape, 32 * 32 + 64)
    log_reading(described)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert all(word in warning for word in (f"{OWN}Observes", "hand", "1,024 numbers", "ObservationWrapper"))
