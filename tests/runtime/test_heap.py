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
from fxpart.runtime.host.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def turn():
    held = [torch.ones(1 << 18) for _ in range(64)]
for _ in range(3):
    turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(*words: str, script: str = _SCRIPT, **variables: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return int(done.stdout)


# A thread, and then the main one, hold 64 tensors of 1 MiB; by how much the process has grown.
_THREADS = """
import sys, threading, torch
from fxpart.runtime.monitor.memory_footprint import read_resident_bytes
from fxpart.runtime.host.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def turn():
    held = [torch.ones(1 << 18) for _ in range(64)]
before = read_resident_bytes()
for _ in range(3):
    thread = threading.Thread(target=turn)
    thread.start()
    thread.join()
turn()
print((read_resident_bytes() - before) >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_a_rank_that_keeps_what_it_frees_touches_no_new_pages() -> None:
    """By default the heap is given back unless something in use lies on its top by chance."""
    assert _faults("keep") < 2000  # of the 163,840 pages that ten turns write
    assert max(_faults("not") for _ in range(6)) > 20_000


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_threads_use_what_others_have_freed() -> None:
    assert 60 <= _faults("keep", script=_THREADS) < 90


def test_what_the_user_sets_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from fxpart.runtime.host.heap import keep_freed_memory

    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    assert not keep_freed_memory()
