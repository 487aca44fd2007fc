"""Rules of a `Config` that go beyond the type and range of each key; most of them relate several keys."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from operator import attrgetter
from typing import TypeAlias

from apex_jax.config.keys import MAX_COMPATIBILITY_KEY_BYTES, Config, NetworkConfig, names_code
from apex_jax.host.errors import CREDENTIALS, UsageError, short_repr

MAX_IPC_PATH_BYTES = 107  # longest path of a Unix socket

Rule: TypeAlias = tuple[str, bool, str]  # key, whether its value is valid, what the value must be


def check(config: Config) -> None:
    """Raises UsageError for the first rule that the configuration breaks."""
    rules = (_size_rules, _network_rules, _address_rules, _service_rules)
    for name, is_right, requirement in (rule for of_group in rules for rule in of_group(config)):
        if not is_right:
            value = attrgetter(name)(config)
            raise UsageError(f"{name}={short_repr(list(value) if isinstance(value, tuple) else value)}: {requirement}")


def _size_rules(config: Config) -> Iterator[Rule]:
    environment, actor, replay, learner = config.environment, config.actor, config.replay, config.learner
    yield "environment.task", environment.task != "", "must be a game, such as Pong-v5"
    form = r"gymnasium:([\w.]+:)?[^:\s]+|vector:[\w.]+:[^:\s]+|gymnax:[^:\s]+|jax:[\w.]+:[^:\s]+"
    is_named = re.fullmatch(form if environment.has_spaces else "[^:]*", environment.task) is not None
    forms = "gymnasium:ID, gymnasium:MODULE:ID, gymnasium:MODULE:FUNCTION, vector:MODULE:FUNCTION, jax:PACKAGE:ID"
    yield "environment.task", is_named, f"must be {forms} or jax:MODULE:FUNCTION"
    yield "environment.python", environment.is_gymnasium or not environment.python, "is for tasks of gymnasium:... only"
    excess = len(config.weights_compatibility_key.encode()) - MAX_COMPATIBILITY_KEY_BYTES
    settings = max(("environment.settings", "algorithm.settings"), key=lambda name: len(attrgetter(name)(config)))
    fix = f"must be {excess} bytes shorter, to be sent to other roles; keep it in a file that your code reads"
    yield settings, excess <= 0, fix
    slots, overlap = actor.segment_slots, environment.frame_stack - 1 + config.algorithm.n_step
    if replay.columns:
        overlap = 1  # see apex_jax.item_codec.item_spec, which checks the size
    least = (
        f"must be at least {overlap + 1}, environment.frame_stack + algorithm.n_step, for a transition to start in it"
    )
    yield "actor.segment_slots", slots > overlap, least
    capacity = "replay.capacity_transitions"
    yield capacity, replay.capacity_transitions >= slots, f"must be at least actor.segment_slots={slots}"
    of_one_process: dict[str, tuple[object, ...]] = {
        "actor.processes": (0, 1),
        "storage.url": ("",),
        "actor.environments_per_step": (0, actor.environments),
    }
    for name, values in of_one_process.items():
        yield name, config.processes == "many" or attrgetter(name)(config) in values, "needs processes=many"
    per_segment = max(1, slots - overlap)
    segments = max(2, replay.capacity_transitions // per_segment)
    most = f"must be at most {segments * per_segment}, what fits in {capacity}, or learning never starts"
    yield "replay.min_size_to_sample", replay.min_size_to_sample <= segments * per_segment, most
    most = f"must be at most {(2**31 - 1) // slots * per_segment}, because a replay index (frame slot) has 31 bits"
    yield capacity, segments * slots < 2**31, most
    most = f"must be 0 to actor.environments={actor.environments}"
    yield "actor.environments_per_step", actor.environments_per_step <= actor.environments, most
    least = f"must be 0, or at least actor.environments={actor.environments}: each environment explores in its own way"
    most = f"must be at most actor.largest_noise={actor.largest_noise:g}"
    yield "actor.smallest_noise", actor.smallest_noise <= actor.largest_noise, most
    yield "actor.ladder_size", actor.ladder_size == 0 or actor.ladder_size >= actor.environments, least
    most = f"must be 0 to learner.prefetch_batches={learner.prefetch_batches}; lower it, or raise that one"
    yield "learner.updates_per_call", learner.updates_per_call <= learner.prefetch_batches, most
    yield (
        "learner.batch_size",
        learner.largest_sample <= 2**22,
        f"with learner.updates_per_call, {learner.largest_sample} a draw, must be at most {2**22}",
    )
    total, first = config.total_environment_frames, replay.min_size_to_sample * environment.frame_skip
    least = f"must be 0, or at least {first}: that many are acted before learning starts (replay.min_size_to_sample)"
    yield "total_environment_frames", total == 0 or total >= first, least


def _network_rules(config: Config) -> Iterator[Rule]:
    algorithm, network, size = config.algorithm, config.network, config.environment.frame_size
    is_named = re.fullmatch(r"\w+|[\w.]+:\w+", algorithm.name) is not None
    yield "algorithm.name", is_named, "must be auto, dqn, dpg, or MODULE:FUNCTION for one of your own"
    is_used = names_code(algorithm.name) or algorithm.settings == "{}"
    yield "algorithm.settings", is_used, f"is not read by algorithm.name={algorithm.name}; leave it out"
    is_right = not algorithm.atoms or (algorithm.atoms > 1 and not algorithm.munchausen and not algorithm.quantiles)
    yield "algorithm.atoms", is_right, "must be 0, or at least 2 without munchausen and quantiles"
    more = f"must be more than algorithm.lowest_return={algorithm.lowest_return:g}"
    yield "algorithm.highest_return", algorithm.highest_return > algorithm.lowest_return, more
    is_named = re.fullmatch(r"auto|[\w.]+:\w+(,\w+)?", network.name) is not None
    yield "network.name", is_named, "must be auto, MODULE:CLASS, or for DPG MODULE:CLASS,CLASS"
    if network.name != "auto":
        return  # the keys below describe the networks of this package
    for name in ("policy_units", "critic_units"):
        yield f"network.{name}", len(getattr(network, name)) > 0, "must have at least one entry, such as [256, 256]"
    if network.torso == "impala":
        yield "network.channels", len(network.channels) > 0, "must have at least one entry, such as [16, 32, 32]"
        return  # this torso sees all pixels
    kernel_sizes, strides = list(network.kernel_sizes), list(network.strides)
    same_length = len(network.channels) == len(kernel_sizes) == len(strides)
    equal = f"must have as many entries as network.kernel_sizes={kernel_sizes} and network.strides={strides}"
    yield "network.channels", same_length, equal
    if not config.environment.is_atari:
        return  # CartPole-v1, WalkerWalk-v1: no pixels, no convolutions
    left = check_convolutions(network, size)
    if network.unseen_pixels or config.evaluator.checkpoint:
        return  # a checkpoint trained with unseen pixels can still be evaluated
    layers = list(zip(kernel_sizes, strides, strict=True))
    force = "to train all the same, set network.unseen_pixels=true"
    skips = f"no stride may be larger than its kernel: the pixels in between would be unseen; {force}"
    yield "network.strides", all(stride <= kernel for kernel, stride in layers), skips
    seen, fitting = _pixels_seen(left, layers), _pixels_seen(left + 1, layers)
    blind = f"leave the last {size - seen} rows and columns of {size} pixels unseen, where a paddle may be"
    fix = f"use environment.frame_size={seen} or {fitting}, or other kernels; {force}"
    yield "network.strides", seen >= size, f"{blind}; {fix}"


def check_convolutions(network: NetworkConfig, pixels: int) -> int:
    """Returns the height of the convolutions' output for images whose smaller side has this many pixels.

    Raises UsageError if a kernel does not fit.
    """
    left = pixels
    if network.torso == "impala" or network.name != "auto":
        return left
    for kernel, stride in zip(network.kernel_sizes, network.strides, strict=True):
        if kernel > left:
            sizes = list(network.kernel_sizes)
            what = f"{kernel} does not fit on the {left} pixels that are left of {pixels}"
            raise UsageError(f"network.kernel_sizes={sizes}: {what}; use smaller kernels or strides")
        left = (left - kernel) // stride + 1
    return left


def _pixels_seen(outputs: int, layers: list[tuple[int, int]]) -> int:
    """Returns how many pixels of a row affect the last convolution's `outputs`; `layers`: (kernel, stride) of each."""
    for kernel, stride in reversed(layers):
        outputs = (outputs - 1) * stride + kernel
    return outputs


def _address_rules(config: Config) -> Iterator[Rule]:
    addresses = dataclasses.asdict(config.addresses)
    for field, address in addresses.items():
        if field == "status" and address == "":
            continue
        name = f"addresses.{field}"
        scheme, _, place = address.partition("://")
        if field == "status":
            what = "must be tcp://HOST:PORT; the processes of this machine report to their run directory, too"
            yield name, scheme != "ipc", what
        yield name, scheme in ("tcp", "ipc"), "must start with tcp:// or ipc://, as in tcp://127.0.0.1:5550"
        host, _, port = place.rpartition(":")
        is_port = re.fullmatch("[0-9]{1,5}", port) is not None and 1 <= int(port) <= 65535
        yield name, scheme == "ipc" or (host != "" and is_port), "must be tcp://HOST:PORT with a port from 1 to 65535"
        is_path = 1 <= len(place.encode()) <= MAX_IPC_PATH_BYTES
        yield name, scheme == "tcp" or is_path, f"must be ipc://PATH with 1 to {MAX_IPC_PATH_BYTES} bytes of path"
        is_file = scheme == "tcp" or not place.startswith(("@", "*"))  # @: any user can connect, *: no client finds it
        yield name, is_file, "must be the path of a file, so that its permissions decide who can connect"
        is_own = [*addresses.values()].count(address) == 1
        yield name, is_own, "is used twice; give each link its own address"


def _service_rules(config: Config) -> Iterator[Rule]:
    security, url = config.security, config.storage.url
    contradiction = f"security.keys={short_repr(security.keys)} encrypts every tcp link; drop one of the two"
    yield "security.insecure", not (security.insecure and security.keys), contradiction
    requirement = url and requirement_of_storage_url(url)
    yield "storage.url", not requirement, requirement
    loggers, info = config.metrics.loggers, config.metrics.info
    is_list = all(re.fullmatch(r"\w[\w./-]*", name, re.ASCII) for name in info) and len(set(info)) == len(info)
    yield "metrics.info", is_list and len(info) <= 16, "must be at most 16 names such as [is_success], each once"
    names = "must be names such as [tensorboard, jsonl, wandb], each once"
    is_list = all(re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name, re.ASCII) for name in loggers)
    yield "metrics.loggers", is_list and len(set(loggers)) == len(loggers), names
    yield "metrics.loggers", "jsonl" in loggers, "must contain jsonl, which live view, plots and limits read"
    yield "metrics.project", config.metrics.project != "", "must be the name of a project"


def requirement_of_storage_url(url: str) -> str:
    """Returns the requirement that `url` does not meet; empty if it meets all."""
    if CREDENTIALS.search(url):
        instead = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment, or AWS_PROFILE"
        return f"must be without credentials, which others could read; {instead}"
    is_right = re.fullmatch("(s3|file)://.*[^/.].*|[^:]+", url) is not None and url.strip("/.") != ""
    return "" if is_right else "must be s3://bucket/prefix, file:///path or a folder"
