"""Specification of the model card: the hub can read its metadata, and a stranger can use what it describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from apex_jax.config import EnvironmentConfig
from apex_jax.export.model_card import model_card
from apex_jax.types import Part
from tests.rigs.exported import KINDS, agent_of

RESULTS = {
    "mean_reward": -12.5,
    "std_reward": 3.14159,
    "n_eval_episodes": 20,
    "lowest": -20.0,
    "median": -12.0,
    "highest": -3.0,
    "exploration": 0.05,
    "eval_datetime": "2026-11-25T08:23:40+00:00",
}
FILES = {"model.safetensors", "policy.stablehlo", "policy.onnx", "config.json", "results.json", "replay.mp4"}
START: dict[str, Any] = {
    "time": 1795594958.7,
    "command": "python main.py --config catch seed=3 storage.url=s3://bucket/x run_directory=/home/me/x",
    "commit": "6a58e6e1",
    "uncommitted_changes": True,
    "changed_settings": ["seed=3 (was 2)"],
}


def card_of(kind: str, run: Path, results: dict[str, Any] | None = RESULTS, files: set[str] = FILES) -> str:
    return model_card(agent_of(kind), run, results, files)


def read_by_the_hub(card: str) -> ModelCardData:
    data = ModelCard(card).data
    assert isinstance(data, ModelCardData)
    return data


def test_the_hub_reads_an_evaluation_in_its_schema(tmp_path: Path) -> None:
    data = read_by_the_hub(card_of("a vector", tmp_path))
    [result] = data.eval_results or []
    assert (result.task_type, result.dataset_type) == ("reinforcement-learning", "Catch-v0")
    assert (result.metric_type, result.metric_value) == ("mean_reward", "-12.5 +/- 3.142")
    assert (data.model_name, data.library_name) == ("Ape-X DQN", "apex_jax")
    assert {"reinforcement-learning", "deep-reinforcement-learning", "dqn", "Catch-v0", "onnx"} <= set(data.tags or [])
    assert data.license is None


@pytest.mark.parametrize("kind", KINDS)
def test_metadata_of_every_agent_is_yaml_between_two_lines(kind: str, tmp_path: Path) -> None:
    card = card_of(kind, tmp_path)
    _, text, page = card.split("---\n", 2)
    data = yaml.safe_load(text)
    assert list(data) == ["library_name", "pipeline_tag", "tags", "model-index"]
    assert re.match(r"\n# Ape-X (Munchausen )?D", page)
    assert "None" not in page.replace("None is stated", "")


def test_card_without_an_evaluation_states_that_there_is_none(tmp_path: Path) -> None:
    card = card_of("a vector", tmp_path, None, {"model.safetensors", "policy.stablehlo", "config.json"})
    assert read_by_the_hub(card).eval_results is None
    assert "have not been evaluated" in card
    for absent in ("onnx", "results.json", "replay.mp4"):
        assert absent not in card


def test_the_page_describes_the_training_of_the_agent(tmp_path: Path) -> None:
    (tmp_path / "starts.jsonl").write_text(json.dumps(START) + "\n")
    card = card_of("a vector", tmp_path)
    texts = ["120 updates", "1,200 steps", "1.5 minutes", "`6a58e6e1`, with uncommitted changes", "seed=3 (was 2)"]
    texts += ["```bash\npython main.py --config catch seed=3\n```"]  # without what is of the machine
    assert [text for text in texts if text not in card] == []


def test_texts_of_somebodys_run_are_neither_html_nor_escape_sequences_on_the_page(tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>\x1b[2J\n\n```\n<script>"
    start = START | {"command": evil, "commit": evil, "changed_settings": [evil]}
    (tmp_path / "starts.jsonl").write_text(json.dumps(start) + "\n")
    agent = agent_of("continuous, normalized")
    parts = (Part((evil,), ()), Part(("joints",), (2, 2)))
    environment = EnvironmentConfig(task=f"gymnasium:{evil}")
    config = agent.config.replace(environment=environment)
    agent = agent._replace(config=config, environment_spec=agent.environment_spec._replace(parts=parts))
    _, metadata, page = model_card(agent, tmp_path, RESULTS, FILES).split("---\n", 2)
    assert "<" not in re.sub("```bash\n.*?\n```\n", "", page, flags=re.DOTALL)
    assert (page + metadata).replace("\n", "").isprintable()
    [command] = re.findall("```bash\n(.*?)\n```\n", page, re.DOTALL)
    assert "\n" not in command
