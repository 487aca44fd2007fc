"""Specification of an exported folder: complete, as the run has it, and loaded again bit for bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apex_jax import load_policy
from apex_jax.config.load import config_of
from apex_jax.export import export_command
from apex_jax.export.folder import run_onnx, write_files
from apex_jax.host.errors import RunError, UsageError
from apex_jax.policy import load_agent
from apex_jax.run.params_file import read_metadata
from apex_jax.run.provenance import result_settings
from tests.rigs.runs import ROOT
from tests.rigs.saved_runs import save_best, save_run

EVALUATION = {"time": 1795594958.0, "updates": 2, "exploration": 0.05, "returns": [1.0, 0.0, -1.0, 1.0]}
FOR_ONNX = """
import onnxruntime
[action] = onnxruntime.InferenceSession("policy.onnx").run(["action"], {"observation": observation})
"""
PLAIN = ("network.layer_norm=false", "network.normalize_observations=false")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a run directory with two checkpoints, of which the second is evaluated and the best, and two videos."""
    directory = tmp_path_factory.mktemp("runs") / "catch"
    save_best(save_run("Catch-v0", directory), updates=2)
    (directory / "evaluations.jsonl").write_text(json.dumps(EVALUATION) + "\n")
    for age, name in enumerate(("new.mp4", "old.mp4", ".unfinished.half.mp4")):
        (directory / name).write_text(name)
        os.utime(directory / name, (10 - age, 10 - age))
    os.utime(directory / ".unfinished.half.mp4", (20, 20))
    return directory


@pytest.fixture(scope="module")
def folder(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("exported")
    assert write_files(made, run) == []
    return made


def test_the_folder_has_every_file_the_results_of_its_params_and_the_newest_complete_video(folder: Path) -> None:
    names = {"README.md", "config.json", "model.safetensors", "policy.onnx", "policy.stablehlo", "replay.mp4"}
    assert {path.name for path in folder.iterdir()} == names | {"results.json"}
    results = json.loads((folder / "results.json").read_text())
    assert (results["mean_reward"], results["n_eval_episodes"], results["updates"]) == (0.25, 4, 2)
    assert results["std_reward"] == pytest.approx(np.std(EVALUATION["returns"]))  # type: ignore[call-overload]
    assert results["eval_datetime"] == "2026-11-25T08:22:38+00:00"
    assert "0.25 +/- 0.8292" in (folder / "README.md").read_text()
    assert (folder / "replay.mp4").read_text() == "new.mp4"


def test_the_configuration_is_that_of_the_run_without_its_paths(run: Path, folder: Path) -> None:
    text = (folder / "config.json").read_text()
    assert str(run) not in text
    assert not re.search("run_directory|url|keys|tcp://", text)
    assert result_settings(config_of(json.loads(text))) == result_settings(load_agent(run, None, {}).config)
    assert json.loads(read_metadata(folder / "model.safetensors")["config"]) == json.loads(text)


def test_no_file_names_a_folder_of_this_machine(run: Path, folder: Path) -> None:
    for path in folder.iterdir():
        content = path.read_bytes()
        assert not [where for where in (ROOT, sys.prefix, run) if str(where).encode() in content], path.name


def test_load_policy_acts_with_the_folder_bit_for_bit_as_with_the_run(run: Path, folder: Path) -> None:
    observations = np.random.default_rng(0).normal(size=(9, 50)).astype(np.float32)
    for found, kept in zip(load_policy(folder).act(observations), load_policy(run).act(observations), strict=True):
        np.testing.assert_array_equal(found, kept)
    assert load_policy(folder, updates=2).updates == 2
    with pytest.raises(RunError, match="holds the params after 2 updates, not 1"):
        load_policy(folder, updates=1)


def test_the_parameters_alone_are_a_policy(folder: Path, tmp_path: Path) -> None:
    name = "model.safetensors"
    (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert load_policy(tmp_path).updates == load_policy(folder).updates


def test_an_earlier_checkpoint_without_evaluation_has_no_results(run: Path, tmp_path: Path) -> None:
    [note] = write_files(tmp_path, run, updates=1)
    assert note.startswith("results.json ")
    assert "python main.py --role evaluator checkpoint=" in note
    assert not (tmp_path / "results.json").exists()
    assert "have not been evaluated" in (tmp_path / "README.md").read_text()


@pytest.mark.long
def test_an_environment_of_ones_own_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    imported = tmp_path / "imported"
    module = f"from tests.rigs.environments import Corridor\nopen({str(imported)!r}, 'a')\n"
    (tmp_path / "of_the_run.py").write_text(module)
    save_run("CartPole-v1", tmp_path / "run", (1,), "environment.task=gymnasium:of_the_run:Corridor")
    imported.unlink()
    (tmp_path / "folder").mkdir()
    write_files(tmp_path / "folder", "run")
    assert not imported.exists()


def test_video_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    save_run("Catch-v0", tmp_path / "run", (1,))
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "run" / "video.mp4").symlink_to(tmp_path / "secret")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="symbolic link"):
        write_files(tmp_path / "folder", tmp_path / "run")
    assert not (tmp_path / "folder" / "replay.mp4").exists()


@pytest.mark.parametrize("part", ["best", "checkpoints/2"])
def test_export_of_a_part_of_a_run_has_evaluation_start_and_video_of_the_run(
    part: str, run: Path, tmp_path: Path
) -> None:
    assert write_files(tmp_path, run / part) == []
    assert json.loads((tmp_path / "results.json").read_text())["n_eval_episodes"] == 4
    page = (tmp_path / "README.md").read_text()
    assert "- apex_jax at commit `" in page
    assert "```bash\n" in page.partition("## Training")[2]
    assert (" minutes\n" in page) == (part != "best"), "a best evaluation does not record them"
    assert (tmp_path / "replay.mp4").read_text() == "new.mp4"


@pytest.mark.long
def test_a_network_of_ones_own_is_exported_once_its_code_is_trusted(tmp_path: Path) -> None:
    folder, network = tmp_path / "folder", "examples.residual_network:ResidualNetwork"
    folder.mkdir()
    save_run("CartPole-v1", tmp_path / "run", (1,), f"network.name={network}", "network.layer_norm=true")
    with pytest.raises(UsageError, match=f"names network.name={network}, .*; if you trust the run and the code, add"):
        write_files(folder, tmp_path / "run")
    [results] = write_files(folder, tmp_path / "run", code={"network.name": network})
    assert results.startswith("results.json ")
    assert (folder / "policy.stablehlo").is_file()
    assert (folder / "policy.onnx").is_file()
    with pytest.raises(UsageError, match=f"names network.name={network}, "):
        load_policy(folder)
    assert load_policy(folder, code=[f"network.name={network}"])([0.0, 0.0, 0.0, 0.0]) in (0, 1)


def test_a_program_that_differs_from_the_policy_is_one_line_of_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing(*given: Any) -> dict[str, np.ndarray]:
        return {name: output + 1e-3 for name, output in run_onnx(*given).items()}

    monkeypatch.setattr("apex_jax.export.folder.run_onnx", differing)
    with pytest.raises(RunError, match=r"^policy\.onnx differs from the policy: "):
        write_files(tmp_path, run)


@pytest.mark.long
@pytest.mark.parametrize(("task", "settings"), [
    ("CartPole-v1", ()), ("Pong-v5", ()), ("WalkerWalk-v1", ()), ("Pendulum-v1", ()), ("Pendulum-v1", PLAIN),
])  # fmt: skip
def test_the_programs_run_without_apex_jax_as_the_page_shows_and_give_the_action_of_the_policy(
    task: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    save_run(task, tmp_path / "run", (1,), *settings)
    write_files(tmp_path / "folder", tmp_path / "run")
    page = (tmp_path / "folder" / "README.md").read_text()
    _, for_jax = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    policy = load_policy(tmp_path / "run")
    spec = policy.environment_spec.spec
    stack = (spec.frame_stack,) if spec.frame_stack > 1 else ()
    expected = policy(np.zeros((1, *stack, *spec.frame_shape), spec.frame_dtype))
    for program in (for_jax, for_jax + FOR_ONNX):
        command = [sys.executable, "-I", "-c", f"{program}\nimport json; print(json.dumps(action.tolist()))"]
        environment = {"JAX_PLATFORMS": "cpu"}
        output = subprocess.check_output(command, cwd=tmp_path / "folder", env=environment, text=True, timeout=120)
        np.testing.assert_allclose(json.loads(output), expected, rtol=1e-5, atol=1e-5)


# The command --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _keep_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # which the command sets


def write(path: Path, run: str, updates: int | None, code: dict[str, str]) -> list[str]:
    (path / "file").write_text(f"{run} {updates} {code}")
    return ["a note"]


def test_a_new_or_empty_folder_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("apex_jax.export.folder.write_files", write)
    (tmp_path / "empty").mkdir()
    (tmp_path / ".new.half").mkdir()  # left by a killed process
    (tmp_path / ".new.half" / "old").touch()
    for name, arguments in (("new", []), ("empty", ["network.name=a:B", "--updates", "7"])):
        assert export_command.run(["run", str(tmp_path / name), *arguments]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}: file\na note\n"
    assert {path.name for path in tmp_path.iterdir()} == {"new", "empty"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert (tmp_path / "empty" / "file").read_text() == "run 7 {'network.name': 'a:B'}"


@pytest.mark.parametrize(("name", "message"), [
    ("full", "is not empty"),
    ("full/file", "is no folder"),
    ("none/new", "there is no folder .*none"),
    ("/", "has no name"),
    ("", "has no name"),
])  # fmt: skip
def test_a_folder_that_cannot_be_made_is_refused_and_kept(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apex_jax.export.folder.write_files", write)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("kept")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"^export: .*{message}"):
        export_command.run(["run", name])
    assert (tmp_path / "full" / "file").read_text() == "kept"
    assert os.listdir(tmp_path) == ["full"]


@pytest.mark.parametrize("error", [RunError("a line"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_export_leaves_nothing(error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *_: object) -> list[str]:
        (path / "file").touch()
        raise error

    monkeypatch.setattr("apex_jax.export.folder.write_files", fail)
    with pytest.raises((RunError, KeyboardInterrupt)):
        export_command.run(["run", str(tmp_path / "new")])
    assert os.listdir(tmp_path) == []
