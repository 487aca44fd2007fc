"""The page of an exported policy on the Hugging Face hub: metadata that the hub reads, and text for people."""

from __future__ import annotations

import html
import os
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import OmegaConf

from apex_jax import __version__
from apex_jax.agent.policy_function import observation_shape
from apex_jax.config import Config, EnvironmentConfig
from apex_jax.host.errors import printable
from apex_jax.policy import Agent
from apex_jax.run.evaluations import return_text
from apex_jax.run.provenance import changes_of, read_starts, shown_command

NAMES = {"dqn": "Ape-X DQN", "dpg": "Ape-X DPG"}  # by algorithm.name
PAPER = "[Horgan et al. 2018](https://arxiv.org/abs/1803.00933)"


def model_card(
    agent: Agent, run: str | os.PathLike[str], results: Mapping[str, Any] | None, files: Collection[str]
) -> str:
    """Returns README.md. `results`: the content of results.json, if it exists; `files`: the folder's other files."""
    environment, name = agent.config.environment, _name(agent)
    task = task_name(environment)
    sections = [
        f"---\n{OmegaConf.to_yaml(OmegaConf.create(metadata(agent, results, files)))}---",
        _text(f"# {name}, trained on {task}"),
        _text(
            f"An agent for {task} of {_source(environment)}, trained with the actors and the replay of Ape-X ({PAPER})"
            f" by apex_jax {__version__}: {learning_rule(agent.config)}."
        ),
        _result(agent, results),
        "## Use",
        _text(_observations(agent)),
        _use(agent, files),
        "## Training",
        _training(agent, run),
        "## Licence",
        "None is stated here. Whoever publishes these parameters chooses one: `license:` in the metadata of this page.",
    ]
    return "\n\n".join(sections) + "\n"


def _text(paragraph: str) -> str:
    """Returns a paragraph in which texts from the run's files are neither HTML nor control characters."""
    return html.escape(printable(paragraph), quote=False)


def task_name(environment: EnvironmentConfig) -> str:
    """Returns the name of a task without the module that registers it."""
    return environment.task.rpartition(":")[2]


def learning_rule(config: Config) -> str:
    """Returns what the learner does, by the options that make it another agent than the paper's."""
    options, name = config.algorithm, config.algorithm.name
    if name == "dqn":
        rule = "double Q-learning" if options.double_q else "Q-learning"
        rule = "Munchausen Q-learning, which is not double" if options.munchausen else rule
        rule += f", over {options.quantiles} quantiles" if options.quantiles else ""
        rule += f", over {options.atoms} atoms" if options.atoms else ""
    elif name == "dpg":
        rule = "deterministic policy gradients" + (", with twin critics" if options.twin_critics else "")
    else:
        rule = f"the algorithm {name}"
    exponent = config.replay.priority_exponent
    drawn = f"prioritized replay (exponent {exponent:g})" if exponent else "uniform replay"
    steps = f"returns over {options.n_step} step{'s' * (options.n_step != 1)}"
    return f"{rule}, {steps}, {drawn}{', layer normalization' * config.network.layer_norm}"


def _source(environment: EnvironmentConfig) -> str:
    if environment.is_jax:
        return "gymnax" if environment.task.startswith("gymnax:") else "JAX"
    return "Gymnasium" if environment.has_spaces else "EnvPool"


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
    options = agent.config.algorithm
    kind = "Munchausen DQN" if options.name == "dqn" and options.munchausen else options.name
    return NAMES.get(kind, f"Ape-X {kind}")


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
    spread = f"{results['lowest']:g} to {results['highest']:g}, median {results['median']:g}"
    return f"{what}: **{score}** ({spread}), raw rewards{how}; {date}."


def _observations(agent: Agent) -> str:
    environment_spec, environment = agent.environment_spec, agent.config.environment
    spec, parts = environment_spec.spec, environment_spec.parts or ()
    arrays = (f"`{part.dtype}[{', '.join(['N', *map(str, observation_shape(part))])}]`" for part in spec.parts.values())
    if len(spec.parts) > 1:
        arrays = (f"`{name}` {array}" for name, array in zip(spec.parts, arrays, strict=True))
    text = f"Observations are {', '.join(arrays)}, of what {task_name(environment)} returns"
    if spec.frame_stack > 1:
        text += f", the newest {spec.frame_stack}, oldest first"
    if parts and parts[0].path:
        text += f"; its parts {', '.join(part.name for part in parts)} are flattened and joined in this order"
    if any(part.counts for part in parts):
        text += ", numbers of a discrete space as one-hot vectors"
    if environment_spec.images:
        named = (
            f"{'/'.join(map(str, image.path)) or 'observation'} ({image.layout})" for image in environment_spec.images
        )
        text += f"; images, as uint8 with channels last and side by side: {', '.join(named)}"
    if spec.action.is_masked:
        text += "; a mask is 1 for valid actions, 0 for the others"
    return f"{text}. Actions are the environment's own, without exploration."


def _use(agent: Agent, files: Collection[str]) -> str:
    parts = agent.environment_spec.spec.parts
    zeros = {name: f"np.zeros({(1, *observation_shape(part))}, np.{part.dtype})" for name, part in parts.items()}
    named = ", ".join(f'"{name}": {array}' for name, array in zeros.items())
    observation = f"{{{named}}}" if len(zeros) > 1 else next(iter(zeros.values()))
    inputs = ", ".join(f"`{name}`" for name in zeros) if len(zeros) > 1 else "`observation`"
    onnx = f"\n\n`policy.onnx` takes {inputs} and returns the same outputs." if "policy.onnx" in files else ""
    return f"""With apex_jax (in a checkout of it: `pip install .`), which also stacks single frames:

```python
from apex_jax import load_policy

policy = load_policy(".")  # this folder
action, value = policy.act(observation)
```

With JAX alone (`pip install jax flatbuffers`):

```python
from pathlib import Path

import jax.export
import numpy as np

policy = jax.export.deserialize(bytearray(Path("policy.stablehlo").read_bytes()))
observation = {observation}  # a batch of any size
outputs = policy.call(observation)  # "action", and its "value" or all "q_values"
action = np.asarray(outputs["action"])
```{onnx}"""


def _training(agent: Agent, run: str | os.PathLike[str]) -> str:
    progress, starts, rows = agent.progress, read_starts(run), []
    learned = f" in {progress.elapsed_seconds / 60:.1f} minutes" if progress.elapsed_seconds else ""
    rows.append(f"{progress.updates:,} updates, {progress.environment_steps:,} steps of the environment{learned}")
    if starts and (commit := starts[-1].get("commit")):
        changed = ", with uncommitted changes" if starts[-1].get("uncommitted_changes") else ""
        rows.append(f"apex_jax at commit `{commit}`{changed}")
    if changes := changes_of(starts):
        rows.append(f"settings changed during the run: {', '.join(changes)}")
    command = f"\n\n```bash\n{shown_command(str(starts[-1].get('command')))}\n```" if starts else ""
    return "\n".join(f"- {_text(row)}" for row in rows) + "\n\n`config.json` has every setting." + command
