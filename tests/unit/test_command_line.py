"""The command line, the configuration files, and every message a user can get from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex_jax.config import Config, EvaluatorConfig, MetricsConfig, NetworkConfig
from apex_jax.config.command_line import ROLES, parse
from apex_jax.config.load import SETTINGS, load
from apex_jax.host.errors import UsageError
from apex_jax.host.program import CONFIGS
from tests.rigs.usage import message, write

# What is right ----------------------------------------------------------------------------------------------------


def test_without_arguments_the_default_file_runs_locally_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = parse([])
    assert (command.role, command.name, command.action) == ("local", "local", "run")
    assert command.config == load(CONFIGS / "atari_cpu.yaml")


@pytest.mark.parametrize("role", ROLES)
def test_role_is_the_name_unless_a_name_is_given(role: str) -> None:
    assert parse(["--role", role]).name == role
    assert parse(["--role", role, "--name", "actor-1"])[:2] == (role, "actor-1")


def test_overrides_may_precede_and_follow_options() -> None:
    command = parse(["seed=3", "--role", "actor", "environment.task=Breakout-v5", "--print-config", "actor.device=gpu"])
    assert (command.role, command.action) == ("actor", "print_config")
    config = command.config
    assert (config.seed, config.environment.task, config.actor.device) == (3, "Breakout-v5", "gpu")


def test_prefix_of_the_roles_own_group_may_be_omitted() -> None:
    config = parse(["--role", "actor", "environments=8", "device=gpu", "seed=3"]).config
    assert (config.actor.environments, config.actor.device, config.seed) == (8, "gpu", 3)
    assert parse(["--role", "replay", "capacity_transitions=300000"]).config.replay.capacity_transitions == 300_000
    assert "unknown key environments" in message("environments=8")
    assert "unknown key checkpoint" in message("--role", "actor", "checkpoint=x")


def test_seeds_are_those_of_a_series_and_the_configuration_has_the_first() -> None:
    command = parse(["--config", "catch", "seeds=5,2", "total_updates=7"])
    assert (command.role, command.seeds, command.config.seed, command.config.total_updates) == ("local", (5, 2), 5, 7)
    assert parse(["--config", "catch", "seed=5"]).seeds == ()


@pytest.mark.parametrize(("given", "processes"), [
    ("", "one"), ("seeds=1,2", "one"), ("--role learner", "many"), ("actor.processes=2", "many"),
    ("evaluator.interval_seconds=5", "many"), ("environment.task=gymnasium:my_file:Slow", "many"),
    ("environment.task=gymnasium:my_file:Fast processes=one", "one"), ("environment.task=CartPole-v1", "one"),
    ("processes=many", "many"),
])  # fmt: skip
def test_configuration_of_one_process_gives_way_to_what_needs_several(given: str, processes: str) -> None:
    assert parse(["--config", "cartpole", *given.split()]).config.processes == processes


def test_one_process_of_a_file_of_the_user_stays(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text((CONFIGS / "cartpole.yaml").read_text())
    own = ["--config", str(tmp_path / "own.yaml"), "environment.task=gymnasium:my_file:Fast"]
    assert parse(own).config.processes == "one"


def test_checkpoint_is_evaluated_with_the_configuration_of_its_run(tmp_path: Path) -> None:
    write(tmp_path, "seed: 77\nenvironment: {task: Boxing-v5}")
    arguments = ["--role", "evaluator", f"checkpoint={tmp_path}", "episodes=3", "video=x.gif"]
    config = parse(arguments).config
    assert (config.seed, config.environment.task) == (77, "Boxing-v5")
    assert config.evaluator == EvaluatorConfig(checkpoint=str(tmp_path), episodes=3, video="x.gif")
    atari = ["--config", str(CONFIGS / "atari.yaml")]
    assert parse([*arguments, *atari]).config.seed == 1
    assert parse(["--role", "evaluator", "checkpoint=nowhere", *atari]).config.evaluator.checkpoint == "nowhere"
    assert "checkpoint=nowhere: no such directory; give" in message("--role", "evaluator", "checkpoint=nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no config.yaml; give" in message("--role", "evaluator", f"checkpoint={tmp_path / 'empty'}")


def test_from_the_files_of_a_run_come_learning_and_network_and_no_path_or_address(tmp_path: Path) -> None:
    write(
        tmp_path,
        "run_directory: /other\nmetrics: {loggers: [antigravity], info: [level]}\nstorage: {url: /other}\n"
        "addresses: {status: 'tcp://127.0.0.1:8080'}\nsecurity: {insecure: true}\nnetwork: {hidden_units: 9}\n"
        "evaluator: {video: /other.mp4, episodes: 7, checkpoint: /x}",
    )
    config = parse(["--role", "evaluator", f"checkpoint={tmp_path}"]).config
    evaluator = EvaluatorConfig(checkpoint=str(tmp_path), episodes=7)
    metrics = MetricsConfig(info=("level",))
    assert config == Config(network=NetworkConfig(hidden_units=9), evaluator=evaluator, metrics=metrics)


@pytest.mark.parametrize("settings", ["{}", "{command: touch x}"])
def test_code_that_a_run_names_must_be_named_on_the_command_line_too(tmp_path: Path, settings: str) -> None:
    write(
        tmp_path, f"environment: {{task: 'gymnasium:os:system', settings: {settings}, frame_stack: 1, frame_skip: 1}}"
    )
    arguments = ["--role", "evaluator", f"checkpoint={tmp_path}"]
    assert f"{tmp_path} names environment.task=gymnasium:os:system" in message(*arguments)
    task = "environment.task=gymnasium:os:system"
    assert parse([*arguments, task]).config.environment.task == "gymnasium:os:system"


def test_configuration_of_a_run_that_is_a_link_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("seed: 3")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").symlink_to(tmp_path / "secret")
    assert "is a symbolic link" in message("--role", "evaluator", f"checkpoint={tmp_path / 'run'}")


def test_empty_argument_of_an_unset_variable_is_not_ignored() -> None:
    assert "Is a directory" in message("--config", "")
    assert "--name '-x': names a log file" in message("--name=-x")
    assert "no such directory" in message("--role", "evaluator", f"checkpoint={'x' * 300}")


def test_help_names_every_key_with_its_default_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help", "--role", "actor"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"  {name}=" in text for name in SETTINGS)
    assert "learner.learning_rate=6.25e-05" in text
    assert "[0 to 10]" in text
    assert "--name" in text


# What is wrong ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        # a value of a wrong type, or out of its range
        ("learner.batch_size=0", ["learner.batch_size=0", "1 to 65_536 transitions"]),
        ("learner.batch_size=[1]", ["learner.batch_size=[1]", "whole number"]),
        ("learner.batch_size=", ["learner.batch_size=null", "whole number"]),
        ("learner.batch_size='32'", ['learner.batch_size="32"', "whole number"]),
        (["network.channels=[16, '32', null]"], ['network.channels=[16, "32", null]', "whole number"]),
        ("environment.task=", ["environment.task=", "Pong-v5"]),
        ("environment.task=os:X-v0", ["environment.task=os:X-v0", "gymnasium:ID"]),
        ("seed=0x" + "f" * 9000, ["seed=", "0 to 2_147_483_647"]),
        ("seed=" + "[" * 100_000, ["longer than 16384 characters"]),
        ("learner.learning_rate=.nan", ["learning_rate=nan", "0 to 10"]),
        ("algorithm.double_q=1", ["double_q=1", "true or false"]),
        ("algorithm.loss=mse", ["algorithm.loss=mse", "squared", "huber"]),
        ("network.channels=16", ["network.channels=16", "list", "[32,64,64]"]),
        ("run_directory=7", ["run_directory=7", "quotes"]),
        ("environment.task=${oc.env:HOME}", ["${oc.env:HOME}", "evaluated"]),
        # a key that is not there, or is a group
        ("lr=1", ["lr", "learner.learning_rate"]),
        # options
        *((name, [f"{name}: "]) for name in ("algorithm.name=a:b:c", "network.name=mine")),
        (["algorithm.settings={atoms: 3}"], ["algorithm.settings="]),
        ("--role boss", ["--role", "boss", "learner"]),
        ("--learning-rate=1e-3", ["--learning-rate", "learner.learning_rate=1e-3"]),
        ("--conf x", ["--conf", "--config"]),
        ("--name ../x", ["--name", "../x", "letters"]),
        ("evaluator.checkpoint=runs/x", ["evaluator.checkpoint=runs/x", "--role evaluator"]),
        ("replay.columns=x:int8", ["replay.columns=x:int8", "--role replay", "--role local"]),
        ("--role learner processes=one", ["processes=one", "--role learner"]),
        *((f"processes=one {other}", [other, "processes=many"]) for other in ("actor.processes=2", "storage.url=copy")),
        *((bad, [bad.rstrip("=")]) for bad in ("metrics.project=", "addresses.status=http://127.0.0.1:80")),
        # a series
        ("--role learner seeds=1,2", ["seeds=1,2", "--role learner"]),
        ("--config catch seeds=1,2 run_directory=x", ["run_directory=x", "seeds=1,2"]),
        ("--config catch seeds=1,2 storage.url=x", ["storage.url=x", "seed=N"]),
        ("--config catch seeds=1,2 total_updates=0", ["seeds=1,2", "total_updates"]),
        *((f"--config catch seeds={bad}", [f"seeds={bad}: must be", "0 to 2147483647"])
          for bad in ("", "1,", "1,x", "1,1", "1,01", "-1", "1.5", "[1,2]", "2147483648")),
        # loggers
        ("metrics.loggers=wandb", ["metrics.loggers=wandb", "list of names"]),
        ("metrics.loggers=[tensorboard]", ["metrics.loggers=['tensorboard']", "must contain jsonl"]),
        (["metrics.loggers=[jsonl, a-b]"], ["metrics.loggers", "[tensorboard, jsonl, wandb]"]),
        ("metrics.loggers=[jsonl,wandb,wandb]", ["metrics.loggers", "each once"]),
        # keys that do not fit each other
        ("actor.segment_slots=8 algorithm.n_step=5", ["actor.segment_slots=8", "at least 9"]),
        ("replay.capacity_transitions=64 actor.segment_slots=65", ["capacity_transitions=64", "segment_slots=65"]),
        ("algorithm.n_step=3 replay.min_size_to_sample=200001", ["min_size_to_sample=200001", "at most 199984"]),
        ("replay.capacity_transitions=1073741824 actor.segment_slots=9", ["capacity_transitions=", "31 bits"]),
        ("actor.environments_per_step=33", ["environments_per_step=33", "actor.environments=32"]),
        ("actor.ladder_size=31", ["ladder_size=31", "actor.environments=32"]),
        ("algorithm.atoms=1", ["algorithm.atoms=1: must be 0, or at least 2"]),
        ("--config atari_cpu algorithm.atoms=51", ["algorithm.atoms=51: ", "without munchausen and quantiles"]),
        ("algorithm.highest_return=0", ["must be more than algorithm.lowest_return=0"]),
        ("actor.largest_noise=0.2", ["actor.smallest_noise=0.3", "actor.largest_noise=0.2"]),
        ("network.policy_units=[]", ["network.policy_units=[]", "at least one entry"]),
        ("learner.updates_per_call=17", ["updates_per_call=17", "learner.prefetch_batches=16"]),
        ("learner.batch_size=65536 learner.updates_per_call=128 learner.prefetch_batches=128", ["65536", "8388608"]),
        ("network.strides=[1]", ["network.channels", "network.strides=[1]", "network.kernel_sizes=[4, 3, 3]"]),
        ("environment.frame_size=20 network.kernel_sizes=[4,7,3]", ["kernel_sizes=[4, 7, 3]", "5 pixels"]),
        ("environment.frame_size=42 network.strides=[3,2,1]", ["network.strides=[3, 2, 1]", "frame_size=40 or 46"]),
        ("environment.frame_size=41 network.kernel_sizes=[2,3,3] network.strides=[3,2,1]",
         ["network.strides=[3, 2, 1]", "larger than its kernel", "network.unseen_pixels=true"]),
        ("total_environment_frames=1000 environment.frame_skip=4 replay.min_size_to_sample=500",
         ["total_environment_frames=1000", "at least 2000", "replay.min_size_to_sample"]),
        ("--config catch run_directory=~/runs/x", ["run_directory=~/runs/x", "in place of ~"]),
        *(([f"metrics.info={names}"], ["metrics.info=", "at most 16 names"])
          for names in ("[level,level]", "['a b']", str([f"n{i}" for i in range(17)]))),
        # addresses
        *((f"addresses.weights={bad}", [f"addresses.weights={bad}", "tcp://"])
          for bad in ("127.0.0.1:1", "udp://127.0.0.1:1", "tcp://:5")),
        *((f"addresses.weights=tcp://{bad}", ["1 to 65535"]) for bad in ("127.0.0.1", "h:0", "h:65536", "h:x")),
        *((f"addresses.weights=ipc://{bad}", ["107 bytes"]) for bad in ("", "x" * 108)),
        *((f"addresses.weights=ipc://{bad}", ["the path of a file"]) for bad in ("@x", "*")),
        *((f"addresses.{link}=tcp://127.0.0.1:5550", ["used twice"]) for link in ("weights", "status")),
        *((f"storage.url={url}", ["s3://bucket/prefix"]) for url in ("memory://x", "gs://bucket/x", "s3://", "/")),
    ],
)  # fmt: skip
def test_mistake_is_one_line_with_key_value_range_and_fix(argv: str | list[str], parts: list[str]) -> None:
    text = message(*(argv.split() if isinstance(argv, str) else argv))
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("url", ["s3://KEY:hidden@bucket/x", "s3://KEY:hid/den@bucket/x", "https://hidden@host/x"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    given = f"storage.url={url}"
    for argv in ([given], [f"--{given}"], [f"storage.ulr={url}"]):
        assert "hid" not in message(*argv)
    assert "AWS_PROFILE" in message(given)


@pytest.mark.parametrize(("text", "part"), [
    *((text, "no keys") for text in ("", "# nothing\n", "- seed\n")),
    *((text, "not YAML") for text in ("42", "seed: !!bool x\n", b"\x00\x01\x02", "[" * 16_384)),
    ("learner:\n  batch_size: '32'\n", 'batch_size="32"'),
    ("seed: 1\nseed: 2\n", "duplicate key seed in line 2"),
    ("learner:\n  batch_size: 1\nlearner.batch_size: 2\n", "given twice"),
    *((text, "group") for text in ("learner: 3\n", "learner:\n")),
    ("[" * 100_000, "longer than 16384 characters"),
])  # fmt: skip
def test_unusable_file_is_named_with_its_problem(text: str | bytes, part: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    line = message("--config", str(path))
    assert str(path)[:40] in line
    assert part in line


@pytest.mark.parametrize("name", ["catch", "catch.yaml"])
def test_configuration_is_found_by_its_name_from_any_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(["--config", name]).config == load(CONFIGS / "catch.yaml")
    (tmp_path / name).write_text("seed: 7\n")
    assert parse(["--config", name]).config == load(None, ["seed=7"])  # a file of the user's comes first
    with pytest.raises(UsageError, match="No such file"):
        parse(["--config", f"elsewhere/{name}"])


def test_missing_file_is_named_with_the_existing_configurations(tmp_path: Path) -> None:
    assert "atari, atari_cpu, car_racing, cartpole, catch, " in message("--config", "nowhere.yaml")
    assert "directory" in message("--config", str(tmp_path)).lower()
