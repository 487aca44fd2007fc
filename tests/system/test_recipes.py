"""The commands of README, docs/recipes.md and docs/gpu.md run as they stand there, in one folder, on a CPU, in small.

Training to the scores that the README names is in test_learning; what is no command of this program is in ELSEWHERE.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rigs.pages import Page
from tests.rigs.ports import free_port
from tests.rigs.processes import ROOT, Programs
from tests.rigs.services import calls_of, write_service

PAGE, RECIPES, GPU = (Page(ROOT / name) for name in ("README.md", "docs/recipes.md", "docs/gpu.md"))
ELSEWHERE = {  # the first words of other commands -> where they are tested
    ("make", "test"): ".ci/run",
    ("pip", "install"): "tests/system/test_package.py",
    ("docker", "compose"): "tests/system/test_container.py",
    ("python", "-m"): "tests/system/test_benchmarks.py",
    ("python", "examples/sweep.py"): "tests/system/test_examples.py",
    ("python", "examples/play.py"): "tests/system/test_examples.py",
    ("tensorboard", "--logdir"): "tests/unit/run/test_metrics.py",
    ("apt", "install"): "tests/system/test_film_oracle.py",
}
LESS = (  # in place of the values of a command
    "actor.processes=1",
    "actor.environments=4",
    "replay.capacity_transitions=20000",
    "replay.min_size_to_sample=500",
    "learner.batch_size=32",
    "learner.updates_per_call=1",
    "evaluator.episodes=2",
    "evaluator.max_episode_frames=400",
)
OWN = "algorithm.name=my_file:make"
SMALL_NETWORK = ("network.channels=[4,8,8]", "network.hidden_units=16")  # of commands for a GPU
LESS_TO_PLAY = ("evaluator.episodes=2", "evaluator.max_episode_frames=400")
MINE = """
import gymnasium, numpy
from soft_q_learning import make
from residual_network import ResidualNetwork as Network

class MyEnv(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.steps = 0
        return numpy.zeros(3, numpy.float32), {}

    def step(self, action):
        self.steps += 1
        return numpy.zeros(3, numpy.float32), float(action), self.steps == 20, False, {}
"""
SECONDS = 300.0


def arguments_of(words: tuple[str, ...]) -> list[str] | None:
    """Returns the arguments of this program in a command; None for another program."""
    if words[:2] == ("make", "train"):
        return [argument for word in words[2:] if word.startswith("ARGS=") for argument in word[5:].split()]
    return list(words[2:]) if words[:2] == ("python", "main.py") else None


COMMANDS = dict.fromkeys([*PAGE.commands, *RECIPES.commands, *GPU.commands])
ALL = [words for words in COMMANDS if len(words) > 1 and words[0] not in ("from", ".", "--config")]
OURS = [arguments for words in ALL if (arguments := arguments_of(words)) is not None]
FLEET = [arguments for arguments in OURS if "security.keys=keys" in arguments]
STATUS = [arguments for arguments in OURS if arguments[:1] == ["status"]]
FILM = [arguments for arguments in OURS if arguments[:1] == ["film"]]  # tests/unit/workers/test_film_command.py
LOCAL = [arguments for arguments in OURS if arguments not in FLEET + STATUS + FILM]


def smaller(arguments: list[str]) -> list[str]:
    """Returns arguments of LOCAL with less to do, and with what a user or a shell puts in place of some of them."""
    if arguments[:1] in (["keys"], ["export"], ["check"], ["--help"]):
        return arguments
    if arguments[:1] in (["plot"], ["tasks"]):
        words = ["Walker" if argument == "[WORD]" else argument for argument in arguments]
        return [path for word in words for path in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    if "evaluator" in arguments:
        return [*(word for word in arguments if not word.startswith("episodes=")), *LESS_TO_PLAY]
    updates = 40 * (1 + LOCAL.index(arguments))  # more than the command before, which may have had the same directory
    less = (*LESS, *(SMALL_NETWORK if "atari" in arguments else ()), f"total_updates={updates}")
    if OWN in arguments:  # the same run as CartPole's otherwise, with another network
        less = (*less, "run_directory=runs/own")
    keys = {setting.partition("=")[0] for setting in less}
    return [*(word for word in arguments if word.partition("=")[0] not in keys), *less]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a user types the commands; it has an environment of theirs, and something in place of wandb."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "my_file.py").write_text(MINE)
    write_service(folder / "services", name="wandb")
    return folder


@pytest.fixture
def at_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{folder / 'services'}:{ROOT / 'examples'}")
    return folder


def test_each_command_is_run_here_or_elsewhere() -> None:
    others = {words[:2] for words in ALL if arguments_of(words) is None}
    assert others == set(ELSEWHERE)
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())
    assert len(LOCAL) >= 20
    assert len([words for words in GPU.commands if arguments_of(words) is not None]) >= 5
    assert (len(FLEET), len(STATUS)) == (4, 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("arguments", LOCAL, ids=[" ".join(["main.py", *arguments]) for arguments in LOCAL])
def test_command_ends_well(arguments: list[str], at_folder: Path, programs: Programs) -> None:
    program = programs.start(*smaller(arguments))
    assert program.exit_code(SECONDS) == 0, program.stderr
    assert "Traceback" not in program.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_commands_have_left_what_the_page_names(at_folder: Path, programs: Programs) -> None:
    """After the commands above: with one of them alone, there is nothing yet."""
    pong = Path("runs/Pong-v5-1")
    left = ["curves.png", "video.mp4", "config.yaml", "checkpoints", "metrics", "report.html", "tensorboard"]
    assert [name for name in left if not (pong / name).exists()] == []
    assert {path.name for path in Path("runs").iterdir()} >= {f"CartPole-v1-{seed}" for seed in (1, 2, 3)}
    assert Path("walker", "README.md").is_file()
    assert Path("pong.mp4").is_file()
    assert calls_of(at_folder / "services"), "what is in place of wandb was sent metrics"
    again = programs.start(*LESS, "total_updates=1000")
    assert again.exit_code(SECONDS) == 0, again.stderr
    best = programs.start("--role", "evaluator", "checkpoint=runs/Pong-v5-1/best", *LESS_TO_PLAY)
    assert best.exit_code(SECONDS) == 0, best.stderr


@pytest.mark.slow
def test_lines_of_python_act(at_folder: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE.text, re.DOTALL)
    names = {"observation": [0.0] * 24}
    exec(code, names)
    assert len(names["action"]) == 6


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_commands_of_several_machines_train_to_the_end_on_one(at_folder: Path, programs: Programs) -> None:
    hosts = dict.fromkeys(("REPLAY", "LEARNER", "ACTOR", "EVALUATOR"), "127.0.0.1")
    here = {port: str(free_port()) for port in ("5550", "5551", "5552")} | hosts
    statuses = {role: str(free_port()) for role in ("replay", "learner", "actor", "evaluator")}

    def of_this_machine(argument: str, role: str) -> str:
        found = re.sub("|".join(here), lambda found: here[found[0]], argument) if "tcp://" in argument else argument
        return found.replace("5560", statuses.get(role, "5560"))

    fleet = []
    for arguments in FLEET:
        role = arguments[arguments.index("--role") + 1]
        words = [of_this_machine(argument, role) for argument in arguments]
        fleet.append(programs.start(*words, *LESS, "actor.ladder_size=4", "total_updates=100"))
    shown = [of_this_machine(argument, argument.partition("=")[0]) for argument in STATUS[0]]
    fleet[0].wait_until(lambda: programs.start(*shown).exit_code(SECONDS) == 0)
    assert [program.exit_code(SECONDS) for program in fleet] == [0, 0, 0, 0], [each.stderr for each in fleet]
