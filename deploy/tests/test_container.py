"""The files of the container: read by their own tools, and the Dockerfile carried out without an engine."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from deploy.tests.test_scripts import say, tool
from tests.rigs.containers import context, entrypoint, instructions, tracked_files
from tests.rigs.processes import ROOT

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

# The base image: this machine's Debian with an empty environment of Python, in a mount namespace, whose changes nobody
# else sees. The base image has no graphics, so those of this machine go.
BASE = """
set -euo pipefail
mount -t tmpfs -o size=8g none "$1/room"
root=$1/room/root
mkdir "$root" "$1/room/upper" "$1/room/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/room/upper,workdir=$1/room/work" "$root"
mount --rbind /dev "$root/dev"
mount -t proc proc "$root/proc"
export PATH=/opt/python/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive
chroot "$root" /usr/bin/python3 -m venv /opt/python
chroot "$root" dpkg --remove --force-depends libegl1 libgl1 libopengl0
test -z "$(chroot "$root" ldconfig -p | grep -E "lib(EGL|GL|OpenGL)[.]so" || true)"
"""

# As an engine does: the program is process 1, which receives no signal that it does not handle.
CHECKS = """
in_container --version
in_container --help | head -1
in_container tasks Pong | grep Pong-v5
in_container --config catch total_updates=300
test -s "$root/runs/Catch-v0-1/curves.png"
test "$(stat -c %u "$root/runs/Catch-v0-1")" = "$user"
test -n "$(ls "$root/runs/.cache/apex_jax")"

in_container --config catch total_updates=100000000 run_directory=runs/endless &
engine=$!
until grep -qs '"learner/updates"' "$root/runs/endless/metrics/learner.jsonl"; do sleep 1; done
kill -TERM "$(pgrep -P "$(pgrep -P "$engine")")" # shell, unshare, program
code=0
wait "$engine" || code=$?
test "$code" = 143
ls -d "$root"/runs/endless/checkpoints/[0-9]*
"""


@pytest.mark.quick
def test_dockerfile_is_clean() -> None:
    assert say(tool("hadolint"), "--no-color", "Dockerfile") == (0, "")


@pytest.mark.quick
@pytest.mark.parametrize("file", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_file_has_the_keys_and_values_of_the_specification_only(file: str) -> None:
    compose = pytest.importorskip("compose_spec")  # it reads no merges of YAML (<<), so they are resolved before
    compose.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load((ROOT / file).read_text())))


def steps(build_context: Path) -> Iterator[str]:
    """Yields the Dockerfile as lines of a shell script, in which $root is the root directory of the image."""
    folder, environment, user = "/", "", "0"
    for name, text in instructions():
        if name == "RUN":
            yield f"chroot $root /usr/bin/env {environment} sh -c {shlex.quote(f'cd {folder} && {text}')}"
        elif name == "COPY":
            *sources, target = text.split()
            paths = " ".join(f"{build_context}/{source}" for source in sources)
            yield f"cp -r {paths} $root{os.path.join(folder, target)}"
        elif name == "WORKDIR":
            folder = text
            yield f"mkdir -p $root{folder}"
        elif name in ("ARG", "ENV"):
            environment += f" {text}"
        elif name == "USER":
            user = text
        else:
            assert name in ("FROM", "VOLUME", "ENTRYPOINT"), name
    program = shlex.join(entrypoint())
    yield f"""user={user}
in_container() {{
    unshare --mount --pid --fork --kill-child --mount-proc=$root/proc \\
        chroot --userspec={user}:{user} $root /usr/bin/env -i PATH=$PATH JAX_PLATFORMS=cpu {environment} \\
        sh -c 'cd {folder} && exec "$@"' sh {program} "$@"
}}"""


@pytest.mark.timeout(1800)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a mount namespace")
def test_image_trains_as_its_user_in_its_volume_and_saves_when_it_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    for path in context(tracked_files()):
        target = tmp_path / "context" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, target)
    script = "\n".join((BASE, *steps(tmp_path / "context"), CHECKS))
    code, said = say("unshare", "--mount", "bash", "-c", script, "container", str(tmp_path), seconds=1750)
    assert code == 0, said
