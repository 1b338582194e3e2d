"""Ranks keep the memory that they free."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Frees 64 tensors of 1 MiB over and over, and counts the pages that the system had to clear.
_SCRIPT = """
import resource, sys, torch
from fxpart.runtime.heap import keep_freed
if sys.argv[1] == "keep":
    assert keep_freed()
def turn():
    held = [torch.ones(1 << 18) for _ in range(64)]
for _ in range(3):
    turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*words: str, **variables: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, *words],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_a_rank_that_keeps_what_it_frees_touches_no_new_pages() -> None:
    """By default the heap is given back unless something in use lies on its top by chance."""
    assert _faults("keep") < 2000  # of the 163,840 pages that ten turns write
    assert max(_faults("not") for _ in range(6)) > 20_000


def test_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxpart.runtime.heap import keep_freed

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    assert not keep_freed()
