"""Files of an adversary: copies of a run, an exported folder and packed results with random damage, opened as users do.

Each must open, or be refused in one line. Meanwhile no module that the files name is imported, and no file outside of
the copy is opened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apex_jax import load_policy
from apex_jax.config.command_line import parse
from apex_jax.export.folder import write_files
from apex_jax.host.errors import RunError, UsageError
from apex_jax.plotting.curves import read_packed
from apex_jax.plotting.plot import groups_of, table
from apex_jax.run.checkpoint_files import write_checksums
from apex_jax.run.metrics import resident_memory_bytes
from results.publish import pack
from tests.fuzz.messages import BOMBS, NASTY
from tests.rigs.saved_runs import save_best, save_run

GROWTH_BYTES = 512 * 2**20  # JAX keeps what it has compiled
LIMIT_SECONDS = 20  # of one opening, which otherwise counts as hanging
SPARSE_BYTES = 2**42
HOSTILE = "fuzz_hostile_module"  # is never imported
VALUES: tuple[Any, ...] = (*NASTY, 5e-324, 1e30, -1e30, 10**30, "\x1b[2J<script>", f"gymnasium:{HOSTILE}:f", [[[]]] * 9)


class Files:
    """The copies, and what became of opening them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random, self._copy, self._outside = random.Random(seed), folder / "copy", folder / "outside"
        self._sound = folder / "sound"
        config = save_run("Catch-v0", self._sound / "run", (1, 2))
        save_best(config, updates=2)
        run = self._sound / "run"
        (run / "metrics").mkdir()
        lines = [{"time": 1e9 + i, "seconds": i, "step": i, "eval/episodic_return": 0.5 * i} for i in range(4)]
        (run / "metrics" / "evaluator.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (self._sound / "folder").mkdir()
        write_files(self._sound / "folder", run)
        pack([run], self._sound / "packed" / "runs.jsonl")
        self._outside.write_text("seed: 3\n")
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        sys.addaudithook(self._audit)

    def open_damaged(self) -> None:
        """Damages a copy and opens it in one of the ways in which users do."""
        kind = self._random.choice(["run", "folder", "folder", "packed", "packed", "packed"])
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._sound / kind, self._copy)
        for _ in range(self._random.choice([1, 1, 1, 2, 4])):
            if paths := sorted(path for path in self._copy.rglob("*") if not path.is_dir()):
                self._damage(self._random.choice(paths))
        for step in self._copy.glob("checkpoints/*"):
            sizes = [path.stat().st_size for path in step.rglob("*") if path.is_file()]
            can_be_written = sum(sizes) < SPARSE_BYTES and not any(path.is_fifo() for path in step.rglob("*"))
            if self._random.random() < 0.7 and can_be_written:  # so that the damage is found by what reads the file
                with contextlib.suppress(OSError, ValueError):
                    write_checksums(step)
        openings: dict[str, list[Callable[[], Any]]] = {
            "run": [self._play, lambda: load_policy(self._copy), lambda: load_policy(self._copy / "best"), self._plot],
            "folder": [lambda: load_policy(self._copy)],
            "packed": [lambda: [run.evaluation for run in read_packed(self._copy / "runs.jsonl")]],
        }
        self._open(kind, self._random.choice(openings[kind]))

    def _play(self) -> None:
        config = parse(["--role", "evaluator", f"checkpoint={self._copy}"]).config
        assert (config.evaluator.video, config.run_directory, config.storage.url) == ("", "", "")

    def _plot(self) -> None:
        table(groups_of([str(self._copy)]))

    def _open(self, kind: str, opening: Callable[[], Any]) -> None:
        signal.signal(signal.SIGALRM, hang)
        signal.alarm(LIMIT_SECONDS)
        self._is_opening = True
        try:
            opening()
            self.outcomes[f"{kind} opened"] += 1
        except (RunError, UsageError, OSError) as error:
            self.outcomes[f"{kind} refused"] += 1
            if not str(error).isprintable() or len(str(error)) > 4_000:
                self.failures.append(f"{kind}: {str(error)[:200]!r}")
        except BaseException as error:
            self.failures.append(f"{kind}: {type(error).__name__}: {str(error)[:300]!r}")
        finally:
            self._is_opening = False
            signal.alarm(0)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not getattr(self, "_is_opening", False):
            return
        if event == "import" and HOSTILE in str(arguments[0]):
            self.failures.append(f"imported {arguments[0]}")
        is_path = event == "open" and isinstance(arguments[0], str | bytes)
        follows = is_path and arguments[2] & os.O_NOFOLLOW == 0
        if follows and os.path.realpath(os.fsdecode(arguments[0])) == str(self._outside):
            self.failures.append("a file outside was opened")

    def _damage(self, path: Path) -> None:
        is_whole = path.is_file() and not path.is_symlink() and path.stat().st_size < SPARSE_BYTES
        content, choose = path.read_bytes() if is_whole else b"", self._random.random()
        if choose < 0.08 or not content:
            path.unlink()
            make = self._random.choice([os.mkfifo, os.mkdir, lambda p: os.symlink(self._outside, p), sparse])
            make(path)
        elif choose < 0.2:
            path.write_bytes(content[: self._random.randrange(len(content) + 1)])
        elif choose < 0.35:
            place = self._random.randrange(len(content))
            path.write_bytes(
                content[:place] + self._random.randbytes(self._random.choice([1, 1, 4])) + content[place + 1 :]
            )
        elif choose < 0.4:
            path.write_bytes(self._random.choice([*BOMBS, b"[" * 100_000, b'{"a":' * 50_000, b"\x00" * 9, b""]))
        else:
            try:
                path.write_bytes(self._changed(path.name, content))
            except (ValueError, TypeError, KeyError, RecursionError, struct.error):  # damaged before
                path.write_bytes(content[::-1])

    def _changed(self, name: str, content: bytes) -> bytes:
        """Returns a file in which a value is another one, if it is JSON, YAML or safetensors."""
        if name.endswith(".safetensors"):
            (length,) = struct.unpack("<Q", content[:8])
            header = json.loads(content[8 : 8 + length])
            metadata = header["__metadata__"]
            key = self._random.choice(sorted(metadata))
            if key in ("config", "interface") and self._random.random() < 0.8:
                metadata[key] = json.dumps(self._other(json.loads(metadata[key])))
            else:
                metadata[key] = str(self._random.choice(VALUES)).encode(errors="replace").decode()
            text = json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text + content[8 + length :]
        lines = content.decode(errors="replace").splitlines(keepends=True)
        number = self._random.randrange(len(lines))
        if name.endswith(".jsonl"):
            lines[number] = json.dumps(self._other(json.loads(lines[number]))) + "\n"
        elif name.endswith(".yaml"):
            indent = lines[number].partition(":")[0]
            lines[number] = f"{indent}: {json.dumps(self._random.choice(VALUES), default=str)}\n"
        else:
            return json.dumps(self._other(json.loads(content))).encode()
        return "".join(lines).encode(errors="replace")

    def _other(self, tree: Any) -> Any:
        """Returns a JSON value with one part replaced."""
        if isinstance(tree, dict | list) and tree and self._random.random() < 0.9:
            key = self._random.choice(sorted(tree) if isinstance(tree, dict) else range(len(tree)))
            copy: Any = tree.copy()
            copy[key] = self._other(copy[key])
            return copy
        value = self._random.choice(VALUES)
        return value.decode("latin-1") if isinstance(value, bytes) else value


def sparse(path: Path) -> None:
    """Makes a file that is larger than any memory, and takes no room."""
    path.touch()
    os.truncate(path, SPARSE_BYTES)


def hang(*_: Any) -> None:
    """Ends an opening that takes too long."""
    raise TimeoutError(f"took more than {LIMIT_SECONDS} s")


def fuzz_files(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Opens `count` damaged copies; returns the figures, with an empty `failures` if everything held."""
    files, memory = Files(folder, seed), [0, 0]
    for number in range(count):
        files.open_damaged()
        memory[number > count // 3] = resident_memory_bytes()  # after a warm-up, and at the end
    if (growth := memory[1] - memory[0]) > GROWTH_BYTES:
        files.failures.append(f"resident memory grew by {growth} bytes")
    figures = {"growth_bytes": growth, "outcomes": dict(sorted(files.outcomes.items())), "failures": files.failures}
    return {"files": count, "seed": seed, **figures}
