"""The command tasks prints what can be trained, and refuses a word that nothing has."""

from __future__ import annotations

import pytest

from apex_jax.host.errors import UsageError
from apex_jax.operations import tasks_command


def test_search_word_lists_the_matching_tasks_with_agent_and_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert tasks_command.run(["classic_control"]) == 0
    rows = {line.partition(" ")[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["CartPole-v1"][1:6] == ["float32", "4", "1", "of", "2"]
    assert rows["Pendulum-v1"][-3:] == ["python", "main.py", "environment.task=Pendulum-v1"]


def test_families_are_listed_and_tasks_that_cannot_be_trained_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert tasks_command.run([]) == 0
    assert "mujoco.dmc" in capsys.readouterr().out
    assert tasks_command.run(["box2d"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 more cannot be trained here: pixels")


@pytest.mark.parametrize(("word", "why"), [("zorro", "EnvPool has none of it"), ("vizdoom", "can train none")])
def test_search_word_without_a_match_is_one_line_of_error(word: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        tasks_command.run([word])
