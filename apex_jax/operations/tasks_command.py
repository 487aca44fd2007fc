"""The command tasks: what can be trained here, and by which arguments."""

from __future__ import annotations

from collections.abc import Sequence

from apex_jax.environments.tasks import families, names, trainable
from apex_jax.host.errors import UsageError, short_repr
from apex_jax.host.output import columns
from apex_jax.host.program import CHECKOUT, NAME, Parser
from apex_jax.types import SegmentSpec


def run(arguments: Sequence[str]) -> int:
    """Prints the tasks that contain a word, or the families of tasks; returns the exit code. Raises UsageError.

    `arguments`: after "tasks".
    """
    word = _parser().parse_args(arguments).word
    if not word:
        print("\n".join(_families()))
        return 0
    candidates = names(word)
    tasks = list(trainable(candidates))
    if not tasks:
        why = "EnvPool has such tasks, but this agent can train none" if candidates else "EnvPool has none of it"
        raise UsageError(f"tasks {short_repr(word)}: {why}; `{NAME} tasks` lists the families")
    print("\n".join(columns([("task", "observation", "actions", "agent", "train it by"), *map(_row, tasks)])))
    if missing := len(candidates) - len(tasks):
        why = "pixels that are not Atari's, other kinds of actions or observations, or several players"
        print(f"\n{missing} more cannot be trained here: {why}.")
    return 0


def _families() -> list[str]:
    rows = [("family", "tasks"), *((name, str(count)) for name, count in families().most_common())]
    advice = f"{NAME} tasks WORD lists the tasks with this word in their name or family, and how to train each."
    return [*columns(rows), "", advice, *(["Scores of those trained here: results/README.md."] if CHECKOUT else [])]


def _row(task: tuple[str, SegmentSpec]) -> tuple[str, ...]:
    name, spec = task
    shape = (spec.frame_stack, *spec.frame_shape) if spec.frame_stack > 1 else spec.frame_shape
    is_discrete, command = spec.action.dtype == "int32", f"{NAME} environment.task={name}"
    of_agent = (f"1 of {spec.action.num_actions}", "dqn") if is_discrete else (f"{spec.action.shape[0]} numbers", "dpg")
    return name, f"{spec.frame_dtype} {'x'.join(map(str, shape))}", *of_agent, command


def _parser() -> Parser:
    parser = Parser(
        "tasks",
        description="Lists the tasks that can be trained, with their agent and arguments.",
        epilog=f"examples: {NAME} tasks walker; {NAME} tasks atari",
    )
    parser.add_argument("word", nargs="?", default="", metavar="WORD", help="in the name or family of the tasks")
    return parser
