"""Compiled loops: what is kept between starts is a convenience, never a condition."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.processes import ROOT

pytestmark = pytest.mark.timeout(300)

PROGRAM = """
from numba.core.caching import IndexDataCacheFile
import numpy as np
from apex_jax.host.compiled import FLOATS_READ, compiled
def fail(*arguments):
    raise ERROR
IndexDataCacheFile.METHOD = fail
def twice(x):
    return 2 * x
print([compiled(*signature)(twice)(np.ones(2)).tolist() for signature in ((), (FLOATS_READ,))])
"""


@pytest.mark.parametrize(
    ("method", "error"), [("save", "OSError(28, 'No space left on device')"), ("load", "EOFError('Ran out of input')")]
)
def test_a_full_disk_or_a_cut_cache_file_costs_only_the_time_to_compile(
    method: str, error: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("METHOD", method).replace("ERROR", error))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, timeout=100)
    assert (result.stdout, result.returncode) == ("[[2.0, 2.0], [2.0, 2.0]]\n", 0), result.stderr
