"""The mistakes in a command line are errors of one line."""

from __future__ import annotations

import pytest

from apex_jax.host.argument_parser import Parser
from apex_jax.host.errors import UsageError


def parser() -> Parser:
    parser = Parser("plot", allow_abbrev=False)
    parser.add_argument("--output")
    return parser


@pytest.mark.parametrize(("arguments", "line"), [
    (["--unknown"], "plot: unrecognized arguments: --unknown; see python main.py plot --help"),
    (["--output"], "plot: argument --output: expected one argument; see python main.py plot --help"),
    (
        ["--output", "a", "--output", "b"],
        "plot: --output is given twice, as a and b; keep one; see python main.py plot --help",
    ),
])  # fmt: skip
def test_parser_raises_one_line_with_the_command_instead_of_exiting(arguments: list[str], line: str) -> None:
    with pytest.raises(UsageError) as error:
        parser().parse_args(arguments)
    assert str(error.value) == line


def test_error_of_a_subparser_names_its_command() -> None:
    commands = Parser("keys").add_subparsers(dest="command", required=True)
    commands.add_parser("create").add_argument("directory")
    with pytest.raises(UsageError, match="the following arguments are required: directory"):
        commands.choices["create"].parse_args([])
