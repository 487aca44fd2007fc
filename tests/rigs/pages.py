"""Pages of Markdown as the tests of the documentation read them: headings, links, code, and commands in it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.rigs.processes import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<(?:img|a) [^>]*(?:src|href)=\"([^\"]+)\"")
_FUNCTION = re.compile(r"^(\w+)\(\) \{ (python main\.py .*) \"\$@\"; \}$", re.MULTILINE)
_ENDS_COMMAND = frozenset(["||", "&&", ";", ";;", "|", "&", "(", ")", "()", ">", ">>", "<", "{", "}", ")>"])
_BEFORE_PROGRAM = ("exec", "sudo", "then", "do", "until", "while", "if", "nice", "time")


@dataclass(frozen=True)
class Page:
    """A page of the documentation."""

    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The page without its blocks of code."""
        return _INDENTED.sub("\n", _FENCE.sub("", self.text))

    @property
    def anchors(self) -> set[str]:
        """The anchors of a page as GitHub names them; repeated headings get a number."""
        anchors: set[str] = set()
        for title in re.findall(r"^#{1,6} (.+)$", self.prose, re.MULTILINE):
            anchor = anchor_of(title)
            taken = sum(1 for other in anchors if re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", other))
            anchors.add(f"{anchor}-{taken}" if anchor in anchors else anchor)
        return anchors

    @property
    def links(self) -> list[str]:
        """Targets within the repository, each once."""
        found = ("".join(groups) for groups in _LINK.findall(_INLINE.sub("", self.prose)))
        return list(dict.fromkeys(target for target in found if not re.match(r"[a-z]+:", target)))

    @property
    def spans(self) -> list[str]:
        """Inline code, each once, on one line."""
        return list(dict.fromkeys(" ".join(span.split()) for span in _INLINE.findall(self.prose)))

    @property
    def shell(self) -> list[str]:
        """Blocks of shell commands."""
        fences = [code for language, code in _FENCE.findall(self.text) if language in ("bash", "sh")]
        return fences + [block for block in _INDENTED.findall(_FENCE.sub("", self.text)) if "python" in block]

    @property
    def commands(self) -> list[tuple[str, ...]]:
        """The words of each command in blocks and inline code, each once; functions of the shell are expanded."""
        found = [words for block in self.shell for words in commands_of(block)]
        found += [words for span in self.spans for words in commands_of(span)]
        return list(dict.fromkeys(found))


def anchor_of(title: str) -> str:
    """Returns the anchor that GitHub makes of a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def commands_of(code: str) -> Iterator[tuple[str, ...]]:
    """Yields the words of each simple command, without `...` and without prefixes of its program."""
    functions = {name: f"{command} " for name, command in _FUNCTION.findall(code)}
    text = _FUNCTION.sub("", code).replace("\\\n", " ")
    pending = ""
    for line in text.splitlines():
        pending += f"{line}\n"
        for name, command in functions.items():
            pending = re.sub(rf"^{name} ", command, pending)
        try:
            words = _words(pending)
        except ValueError:  # a quotation that goes on in the next line
            continue
        pending = ""
        command_words: list[str] = []
        for word in [*words, ";"]:
            if word not in _ENDS_COMMAND:
                command_words.append(word)
            elif command_words:
                yield from _stripped(command_words)
                command_words = []


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = "#" if re.search(r"(^|\s)#", line) else ""
    return list(lexer)


def _stripped(words: list[str]) -> Iterator[tuple[str, ...]]:
    while words and (words[0] in _BEFORE_PROGRAM or re.fullmatch(r"[A-Z_]+=.*", words[0])):
        words = words[1:]
    if words:
        yield tuple(word for word in words if word != "...")
