"""What a user reads of a mistake: one short line that no terminal obeys."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apex_jax.host.errors import FatalError, RunError, UsageError, first_line, printable, short_repr
from apex_jax.host.program import Parser


@settings(max_examples=30, deadline=None)
@given(value=st.text() | st.integers() | st.floats() | st.booleans() | st.none() | st.lists(st.text(max_size=5)))
def test_any_value_is_shown_on_one_short_printable_line(value: object) -> None:
    text = short_repr(value)
    assert len(text) <= 80
    assert text.isprintable()


def test_values_are_shown_as_a_user_writes_them() -> None:
    assert [short_repr(value) for value in (True, None, 0.5, "a b")] == ["true", "", "0.5", "a b"]
    assert short_repr(10**5000) == "(a number of thousands of digits)", "Python writes none of more than 4,300 digits"
    assert short_repr("x" * 81) == "x" * 77 + "..."


@settings(max_examples=30, deadline=None)
@given(text=st.text())
def test_text_of_a_peer_is_printed_without_control_characters_and_line_breaks(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(text) == text or not text.isprintable()


@pytest.mark.parametrize(("error", "line"), [
    (ValueError("one\ntwo"), "one"), (ValueError("  \n"), "ValueError"), (KeyError("x"), "'x'"), (OSError(), "OSError"),
    (ValueError("x" * 2000), "x" * 1000 + "..."),
])  # fmt: skip
def test_first_line_of_an_error_is_its_text_or_its_name(error: Exception, line: str) -> None:
    assert first_line(error) == line


@pytest.mark.parametrize("kind", [UsageError, RunError, FatalError])
def test_text_of_a_file_reaches_no_terminal_with_its_escape_sequences(kind: type[Exception]) -> None:
    error = kind("run \x1b[2J\x1b]0;title\x07 of\nsomebody")
    assert str(error).replace("\n", "").isprintable()
    assert str(error).endswith("\nsomebody"), "an error may have the end of a log in lines of its own"
    assert first_line(ValueError("\x1b[31mred")).isprintable()
    assert str(kind("an error")) == "an error"


@pytest.mark.parametrize(("arguments", "word"), [(["--unknown"], "--unknown"), (["--output"], "--output")])
def test_parser_raises_one_line_with_the_command_instead_of_exiting(arguments: list[str], word: str) -> None:
    parser = Parser("plot")
    parser.add_argument("--output")
    with pytest.raises(UsageError, match=f"^plot: .*{word}.* plot --help$"):
        parser.parse_args(arguments)
