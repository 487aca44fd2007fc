"""The page of an exported policy on the Hugging Face hub: metadata that the hub reads, and text for people."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import OmegaConf

from apex_jax import __version__
from apex_jax.agent.policy_function import observation_shape
from apex_jax.config import EnvironmentConfig
from apex_jax.host.errors import printable
from apex_jax.policy import Agent
from apex_jax.run.evaluations import return_text
from apex_jax.run.provenance import machine_of, read_changes, read_starts, shown_command
from apex_jax.types import Part

AGENTS = {  # by algorithm.name: the agent, and what its networks are
    "dqn": ("Ape-X DQN", "double Q-learning with n-step returns and prioritized replay"),
    "dpg": ("Ape-X DPG", "deterministic policy gradient with n-step returns and prioritized replay"),
}
PAPER = "[Horgan et al. 2018](https://arxiv.org/abs/1803.00933)"
RAW = "Give them as they are: the policy contains the scaling that it was trained with."
FILES = {
    "model.safetensors": "the parameters, with shapes and settings as metadata",
    "policy.stablehlo": "the policy for JAX, by `jax.export`, for CPU and CUDA",
    "policy.onnx": "the policy for ONNX Runtime and others",
    "config.json": "every setting that affects the result",
    "results.json": "the evaluation",
    "replay.mp4": "an episode of the run, its newest video",
}


def model_card(
    agent: Agent, run: str | os.PathLike[str], results: Mapping[str, Any] | None, files: Collection[str]
) -> str:
    """Returns README.md. `results`: the content of results.json, if it exists; `files`: the folder's other files."""
    environment, name = agent.config.environment, _name(agent)
    task, source = task_name(environment), _source(environment)
    sections = [
        f"---\n{OmegaConf.to_yaml(OmegaConf.create(metadata(agent, results, files)))}---",
        _text(f"# {name}, trained on {task}"),
        _text(f"An Ape-X agent ({PAPER}) for {task} of {source}: {_what(agent)}.")
        + f" It was trained with apex_jax {__version__}, an implementation of Ape-X in JAX, and acts here without"
        " exploration.",
        "## Result",
        _result(agent, results),
        "## Observations and actions",
        _text(_observations(agent), _actions(agent)),
        "## Use",
        _use_jax(agent),
        *([_use_onnx(agent)] if "policy.onnx" in files else []),
        _use_apex_jax(),
        "## Training",
        _training(agent, run),
        "## Files",
        "\n".join(f"- `{file}`: {meaning}" for file, meaning in FILES.items() if file in files),
        "## Licence",
        "None is stated here. Whoever publishes these parameters chooses one: `license:` in the metadata of this page.",
    ]
    return "\n\n".join(sections) + "\n"


def _text(*paragraphs: str) -> str:
    """Returns paragraphs in which texts from the run's files are neither HTML nor control characters."""
    return html.escape("\n\n".join(map(printable, paragraphs)), quote=False)


def task_name(environment: EnvironmentConfig) -> str:
    """Returns the name of a task without the module that registers it."""
    return environment.task.rpartition(":")[2]


def _source(environment: EnvironmentConfig) -> str:
    if environment.is_jax:
        return "gymnax" if environment.task.startswith("gymnax:") else "JAX"
    return "Gymnasium" if environment.is_gymnasium else "EnvPool"


def metadata(agent: Agent, results: Mapping[str, Any] | None, files: Collection[str]) -> dict[str, Any]:
    """Returns the metadata for the hub; `model-index` has the evaluation in the form of the hub's course on deep RL."""
    task = task_name(agent.config.environment)
    formats = [name for name, file in (("safetensors", "model.safetensors"), ("onnx", "policy.onnx")) if file in files]
    tags = ["reinforcement-learning", "deep-reinforcement-learning", "apex_jax", "ape-x", agent.config.algorithm.name]
    record: dict[str, Any] = {
        "library_name": "apex_jax",
        "pipeline_tag": "reinforcement-learning",
        "tags": [*tags, task, "jax", "stablehlo", *formats],
    }
    if results is None:
        return record
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement-learning"},
        "dataset": {"name": task, "type": task},
        "metrics": [{"type": "mean_reward", "value": _score(results), "name": "mean_reward", "verified": False}],
    }
    return record | {"model-index": [{"name": _name(agent), "results": [result]}]}


def _score(results: Mapping[str, Any]) -> str:
    return f"{return_text(results['mean_reward'])} +/- {return_text(results['std_reward'])}"


def _name(agent: Agent) -> str:
    name = agent.config.algorithm.name
    return AGENTS[name][0] if name in AGENTS else f"Ape-X {name}"


def _what(agent: Agent) -> str:
    name = agent.config.algorithm.name
    return AGENTS[name][1] if name in AGENTS else "prioritized replay"


def _result(agent: Agent, results: Mapping[str, Any] | None) -> str:
    if results is None:
        return "These parameters have not been evaluated."
    how, is_discrete = "", agent.environment_spec.low is None
    if results["exploration"]:
        kind = "random actions at a rate" if is_discrete else "noise of a standard deviation"
        how = f", with {kind} of {results['exploration']:g}"
    score, games = _score(results), results["n_eval_episodes"]
    date = results["eval_datetime"].partition("T")[0]
    what = f"Mean return and standard deviation of {games} episode{'s' * (games != 1)}"
    return f"{what}: **{score}**, raw rewards{how}; {date}."


def _observations(agent: Agent) -> str:
    environment_spec, environment = agent.environment_spec, agent.config.environment
    spec, shape = environment_spec.spec, observation_shape(environment_spec)
    text = f"Observations are `{spec.frame_dtype}{['N', *shape]}`".replace("'", "")
    task, source = task_name(environment), _source(environment)
    if spec.frame_dtype == "uint8":
        stack = spec.frame_stack
        frames = f"the newest {stack} frames, oldest first" if stack > 1 else "one frame"
        if environment.has_spaces:
            axes = "height, width and colors" if len(spec.frame_shape) == 3 else "height and width, in grey"
            return f"{text}: {frames}, each with axes of {axes}, as {task} returns it."
        rate = f"one of every {environment.frame_skip} of the emulator"
        return f"{text}: {frames}, {rate}, in grey and scaled to {shape[-2]}x{shape[-1]} pixels as EnvPool does it."
    parts = environment_spec.parts or (Part((), shape),)
    if not parts[0].path:
        return f"{text}, as {task} of {source} returns them, {_encoding(parts[0])}. {RAW}"
    listed = ", ".join(f"{part.name} {list(part.shape)} {_encoding(part)}" for part in parts)
    return f"{text}: the parts {listed}; joined in this order. {RAW}"


def _encoding(part: Part) -> str:
    """Returns how a part of an observation becomes part of the vector."""
    if not part.counts:
        return "flattened"
    ranges = zip(part.starts, part.counts, strict=True)
    return f"one-hot ({', '.join(f'{start} to {start + count - 1}' for start, count in ranges)})"


def _actions(agent: Agent) -> str:
    environment_spec = agent.environment_spec
    action = environment_spec.spec.action
    if environment_spec.low is None or environment_spec.high is None:
        count = action.num_actions
        values = f"`q_values` `float32[N, {count}]` estimate the discounted return of each action"
        first = environment_spec.first_action
        mask = f" The last {count} elements of an observation are 1 for the actions that are valid, 0 for the others."
        what = f"`int32[N]`, {first} to {first + count - 1}, the action"
        if part := environment_spec.action_part:
            kinds = f"`int32{['N', *part.shape]}`".replace("'", "")
            what = (
                f"{kinds}, {_encoding(part).removeprefix('one-hot ')}, the combination (the last part counts fastest)"
            )
        text = f"`action` is {what} with the highest value; {values}."
        return text + mask * action.is_masked
    bounds = sorted(set(zip(environment_spec.low, environment_spec.high, strict=True)))
    low, high = environment_spec.low, environment_spec.high
    within = f"from {bounds[0][0]:g} to {bounds[0][1]:g}" if len(bounds) == 1 else f"from {list(low)} to {list(high)}"
    text = f"`action` is `float32[N, {action.shape[0]}]`, {within}, in the environment's own bounds"
    return f"{text}; `value` `float32[N]` estimates the discounted return from there."


def _use_jax(agent: Agent) -> str:
    return f"""With JAX alone (`pip install jax flatbuffers`):

```python
from pathlib import Path

import jax.export
import numpy as np

policy = jax.export.deserialize(bytearray(Path("policy.stablehlo").read_bytes()))
observation = {_example(agent)}
outputs = policy.call(observation)
action = np.asarray(outputs["action"])
```"""


def _use_onnx(agent: Agent) -> str:
    return f"""With ONNX Runtime (`pip install onnxruntime`):

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("policy.onnx")
observation = {_example(agent)}
[action] = session.run(["action"], {{"observation": observation}})
```"""


def _use_apex_jax() -> str:
    return """With apex_jax (in a checkout of it: `pip install .`), which also stacks single frames:

```python
from apex_jax import load_policy

policy = load_policy(".")  # this folder
action, value = policy.act(observation)
```"""


def _example(agent: Agent) -> str:
    shape = ", ".join(map(str, (1, *observation_shape(agent.environment_spec))))
    return f"np.zeros(({shape}), np.{agent.environment_spec.spec.frame_dtype})  # a batch of any size"


def _training(agent: Agent, run: str | os.PathLike[str]) -> str:
    progress, starts = agent.progress, read_starts(run)
    skip = agent.config.environment.frame_skip
    frames = progress.environment_steps * skip
    rows = [
        f"{progress.updates:,} updates with batches of {agent.config.learner.batch_size}",
        f"{progress.environment_steps:,} steps of the environment" + (f" ({frames:,} frames)" if skip > 1 else ""),
        *([f"{progress.elapsed_seconds / 60:.1f} minutes of learning"] if progress.elapsed_seconds else []),
        *_origin(starts),
    ]
    if changes := read_changes(run):
        rows.append(f"settings changed during the run: {', '.join(changes)}")
    command = f"\n\n```bash\n{shown_command(str(starts[-1].get('command')))}\n```" if starts else ""
    return "\n".join(f"- {_text(row)}" for row in rows) + "\n\n`config.json` has every setting." + command


def _origin(starts: list[dict[str, Any]]) -> list[str]:
    """Returns the machines, packages and commit of a run's starts, as far as they are recorded."""
    if not starts:
        return []
    machines = dict.fromkeys(map(machine_of, starts))
    newest = starts[-1]
    versions = newest.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    packages = [f"{name} {versions[name]}" for name in ("jax", "flax", "envpool") if versions.get(name)]
    rows = [
        f"started on {time.strftime('%Y-%m-%d', time.gmtime(starts[0]['time']))}, on {' and '.join(machines)}",
        f"Python {newest.get('python')}, {', '.join(packages)}",
    ]
    if newest.get("commit"):
        changed = ", with uncommitted changes" if newest.get("uncommitted_changes") else ""
        rows.append(f"apex_jax at commit `{newest['commit']}`{changed}")
    return rows
