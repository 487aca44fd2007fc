"""The examples run, and the one page learns its tasks: `python -m pytest -m slow tests/system/test_examples.py`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import optuna
import pytest
from nbclient import NotebookClient

from apex_jax import load_policy
from apex_jax.config import Config
from apex_jax.config.load import load
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from examples import one_process, sweep
from examples.picture_and_numbers import Errand
from tests.rigs.processes import ROOT, free_tcp_addresses
from tests.rigs.saved_runs import save_run

SCRIPT = ROOT / "examples" / "one_process.py"
NOTEBOOK = SCRIPT.with_name("cartpole.ipynb")
OWN = (
    "algorithm.name=hl_gauss:make",
    "algorithm.name=soft_q_learning:make",
    "network.name=residual_network:ResidualNetwork",
    "algorithm.name=random_network_distillation:make",
)
RATE = "learner.learning_rate=2e-3"  # at which each of them learns CartPole in a minute
MAIN = ROOT / "main.py"
SHORT = ("total_updates=16", "evaluator.episodes=2", "evaluator.max_episode_frames=50", "replay.journal=false")


def run(
    directory: Path, *arguments: str, seconds: float, script: Path = SCRIPT, code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Runs the script outside of the checkout, so that it has to find the package by itself, to this exit code."""
    command = [sys.executable, str(script), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == code, done.stderr
    return done


def mean_of_play(done: subprocess.CompletedProcess[str]) -> float:
    found = re.fullmatch(r"mean return (-?[\d.]+) of \d episodes: .*\n", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


def mean_return(output: str) -> float:
    found = re.search(r"^evaluation: mean return (-?[\d.]+) of", output.splitlines()[-1])
    assert found, output
    return float(found[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "config",
    [load(None, [*one_process.CARTPOLE.split(), *SHORT]), load(CONFIGS / "pendulum.yaml", SHORT)],
    ids=["dqn", "dpg"],
)
def test_one_loop_acts_learns_and_evaluates(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one_process.train(config)
    assert mean_return(capsys.readouterr().out) != 0
    assert not list(tmp_path.iterdir()), "it keeps everything in memory"


@pytest.mark.long
@pytest.mark.parametrize("task", ["Pendulum-v1", "WalkerWalk-v1"])
def test_a_trained_agent_plays_in_gymnasium_or_envpool(task: str, tmp_path: Path) -> None:
    save_run(task, tmp_path / "run")
    done = run(tmp_path, "run", "--episodes", "2", seconds=100, script=SCRIPT.with_name("play.py"))
    found = re.fullmatch(r"mean return (-?[\d.]+) of 2 episodes: (-?[\d.]+) (-?[\d.]+)\n", done.stdout)
    assert found, done.stdout
    assert float(found[1]) == pytest.approx((float(found[2]) + float(found[3])) / 2, abs=0.1)


@pytest.mark.long
def test_agent_of_this_repository_walks(tmp_path: Path) -> None:
    agent = ROOT / "results" / "walker" / "policy"
    done = run(tmp_path, str(agent), "--episodes", "1", seconds=100, script=SCRIPT.with_name("play.py"))
    assert float(done.stdout.split()[2]) > 800, done.stderr


@pytest.mark.long
def test_replay_alone_goes_on_after_a_crash_with_every_item(tmp_path: Path) -> None:
    addresses = [each for each in free_tcp_addresses() if "weights" not in each]
    done = run(tmp_path, *addresses, seconds=200, script=SCRIPT.with_name("replay_only.py"))
    assert "2000 of the 2000 items from before the crash were drawn after it" in done.stdout
    assert float(done.stdout.split()[-1]) < 0.01, done.stdout
    assert not list(tmp_path.iterdir())


def test_notebook_is_committed_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") or cell["metadata"] for cell in cells)


@pytest.mark.ci
@pytest.mark.timeout(300)
def test_notebook_trains_twice_plots_plays_and_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # EnvPool sets it in this process
    notebook = nbformat.reads(NOTEBOOK.read_text().replace("10_000", "40"), as_version=4)
    client = NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    shown = [kind for output in outputs for kind in output.get("data", ())]
    assert (shown.count("image/png"), shown.count("image/gif")) == (2, 1)
    assert not [output.text for output in outputs if "Warning" in output.get("text", "")]
    bars = [state["outputs"] for state in client.widget_state.values() if "outputs" in state]
    assert len(bars) == 2
    assert "updates; best " in str(bars)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"cartpole-1", "cartpole-2"}


@pytest.mark.long
@pytest.mark.timeout(200)
def test_sweep_names_the_best_of_its_trials(tmp_path: Path) -> None:
    done = run(tmp_path, "--trials", "2", "--updates", "40", seconds=190, script=SCRIPT.with_name("sweep.py"))
    found = re.search(r"^best of 2 trials: (runs/sweep-[\d-]+/trial-[01]), return (\d+\.\d+), ", done.stdout, re.M)
    assert found, done.stdout
    assert load_policy(tmp_path / found[1]).updates == 40


@pytest.mark.long
@pytest.mark.timeout(200)
def test_sweep_ends_the_run_of_a_pruned_trial(tmp_path: Path) -> None:
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=501))  # no return of CartPole
    study.optimize(lambda trial: sweep.train(trial, 1000, tmp_path), 1)
    assert study.trials[0].state.name == "PRUNED"
    assert list(study.trials[0].intermediate_values) == [100]


@pytest.mark.parametrize("setting", [OWN[0], *(pytest.param(each, marks=pytest.mark.long) for each in OWN[1:])])
def test_own_algorithm_or_network_acts_learns_and_is_evaluated(
    setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    one_process.train(load(CONFIGS / "cartpole.yaml", [setting, *SHORT, "replay.min_size_to_sample=500"]))
    assert mean_return(capsys.readouterr().out) != 0


@pytest.mark.long
@pytest.mark.parametrize("setting", [OWN[0], OWN[2]])
@pytest.mark.timeout(400)
def test_own_algorithm_or_network_trains_in_every_role_and_is_evaluated_and_loaded(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    shutil.copy(SCRIPT.with_name(f"{setting.partition('=')[2].partition(':')[0]}.py"), tmp_path)
    many = ("--config", "cartpole", setting, "processes=many", *SHORT, "run_directory=run")
    done = run(tmp_path, *many, seconds=300, script=MAIN)
    assert re.search(r"^Evaluation: .* after 16 updates", done.stdout, re.MULTILINE), done.stdout

    play = ("--role", "evaluator", "checkpoint=run", "episodes=1")
    refused = run(tmp_path, *play, seconds=100, script=MAIN, code=2)
    assert refused.stdout == "", "what the run names is not imported"
    assert f"if you trust the run and the code, add {setting} (in Python: " in refused.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    arguments = ("--role", "evaluator", "checkpoint=../run", "episodes=1", setting)
    played = run(elsewhere, *arguments, seconds=100, script=MAIN)
    assert played.stdout.startswith("CartPole-v1: mean return "), played.stderr
    run(elsewhere, "export", "../run/best", "exported", setting, seconds=100, script=MAIN)

    with pytest.raises(UsageError, match=re.escape(setting)):
        load_policy(tmp_path / "run")
    assert load_policy(tmp_path / "run", code=[setting])([0.0, 0.0, 0.0, 0.0]) in (0, 1)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("name", "kind"), [("own_environment", "gymnasium"), ("own_jax_environment", "jax")])
def test_own_environment_is_learned(name: str, kind: str, tmp_path: Path) -> None:
    learned = ("total_updates=0", "evaluator.stop_at_return=-50")  # random actions have about -83, the best ones -11
    done = run(tmp_path, *learned, seconds=350, script=SCRIPT.with_name(f"{name}.py"))
    assert "Ended:       evaluator.stop_at_return=-50 is reached\n" in done.stdout
    directory = tmp_path / "runs" / f"{kind}-{name}-Docking-1"
    assert (directory / "video.mp4").is_file()
    task = f"environment.task={kind}:{name}:Docking"
    played = run(SCRIPT.parent, str(directory), task, seconds=100, script=SCRIPT.with_name("play.py"))
    assert mean_of_play(played) > -60, played.stderr


@pytest.mark.parametrize("part", ["picture", "wanted"])
def test_errand_has_a_twin_that_looks_the_same_in_one_part_and_pays_the_opposite(part: str) -> None:
    rng, paid = np.random.default_rng(1), 0.0
    for seed in range(30):
        errand, twin = Errand(part), Errand(part)
        np.testing.assert_array_equal(errand.reset(seed=seed)[0], twin.reset(seed=seed)[0])
        if part == "picture":
            twin.wanted = 1 - twin.wanted
        else:
            twin.things = twin.things[::-1]
        is_over = False
        while not is_over:
            action = int(rng.integers(4))  # of any policy: it sees the same
            (seen, reward, *ends, _), (also_seen, its_reward, *its_ends, _) = errand.step(action), twin.step(action)
            np.testing.assert_array_equal(seen, also_seen)
            assert (its_reward, its_ends) == (-reward, ends), "so the mean of both is 0"
            is_over, paid = any(ends), paid + abs(reward)
    assert paid > 10


@pytest.mark.long
@pytest.mark.timeout(400)
def test_images_of_an_own_environment_are_read_learned_and_filmed(tmp_path: Path) -> None:
    short = ("total_minutes=0", "replay.min_size_to_sample=500", "actor.environments=4", *SHORT)
    done = run(tmp_path, *short, seconds=350, script=SCRIPT.with_name("own_pixels.py"))
    assert "64 x 64 pixels with 3 channels (environment.observation_layout=HWC)" in done.stderr
    assert re.search(r"^Evaluation: .* after 16 updates", done.stdout, re.MULTILINE), done.stdout
    assert (tmp_path / "runs" / "gymnasium-own_pixels-Grid-1" / "video.mp4").is_file()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_images_of_an_own_environment_are_learned_within_ten_minutes(tmp_path: Path) -> None:
    done = run(tmp_path, "evaluator.stop_at_return=0.9", seconds=800, script=SCRIPT.with_name("own_pixels.py"))
    assert "evaluator.stop_at_return=0.9 is reached" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arguments", "score"), [((), 195.0), (("--config", "pendulum"), -300.0)], ids=["cartpole", "pendulum"]
)
def test_one_process_learns_its_task(tmp_path: Path, arguments: tuple[str, ...], score: float) -> None:
    done = run(tmp_path, *arguments, seconds=800)
    assert mean_return(done.stdout) >= score, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setting", OWN)
def test_own_algorithm_or_network_learns_cartpole(tmp_path: Path, setting: str) -> None:
    limits = ("evaluator.stop_at_return=195", f"run_directory={tmp_path}/run", "total_updates=24000")
    done = run(SCRIPT.parent, "--config", "cartpole", setting, *limits, RATE, seconds=800, script=MAIN)
    assert "evaluator.stop_at_return=195 is reached" in done.stdout
