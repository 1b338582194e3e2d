"""Runs a reader over changed files: only our errors, no second of time, no flood of memory."""

from __future__ import annotations

import base64
import gc
import resource
import signal
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fuzz.mutations import Sample, mutated
from fxpart.errors import FxpartError

SECONDS = 1.0  # of the processor, for one file
MEMORY = 512 << 20  # address space beyond what the process has, for one file
LONGEST = 150_000  # characters of what is said of a file, however long it is
_SHRINKING = 300  # tries to make a failing file smaller
_SETTLED = 250  # files after which what libraries keep of them is no longer a file's


class TooLong(BaseException):
    """The reader did not end within the time; no reader catches it."""


@dataclass
class Outcome:
    """What came of many files. codes: of the errors; "read" where there was none."""

    codes: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    seconds: float = 0.0


@contextmanager
def bounded() -> Iterator[None]:
    """Memory and time as they are allowed to a reader: MemoryError and :class:`TooLong` else."""
    _settle()
    often = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # as programs have it; the tests' own number lets garbage wait
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    before = signal.signal(signal.SIGVTALRM, _stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        gc.set_threshold(*often)
        gc.unfreeze()


def _settle() -> None:
    """Full collections pass over all that there is by now.

    They come whenever they like, and take a second where other tests (or torch's caches, which keep
    some 180 objects of every reproducer that is read) have left a million objects: no file's fault.
    """
    gc.collect()
    gc.freeze()


def _stop(*_: object) -> None:
    raise TooLong(f"longer than {SECONDS} s")


def fault(read: Callable[[bytes], object], data: bytes) -> tuple[str, str]:
    """What came of one file, ("read" or a code, "") if it is right; else ("", what was wrong)."""
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        read(data)
        return "read", ""
    except FxpartError as refused:
        wrong = unsaid(refused)
        return "" if wrong else refused.code, wrong
    except (Exception, TooLong):
        return "", traceback.format_exc(limit=-6)[-3000:]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def unsaid(refused: FxpartError) -> str:
    """What is wrong with how a file is refused; "" where nothing is."""
    message = str(refused)
    if "FXP900" in {problem.code for problem in refused.problems}:
        return f"it calls it a fault of its own:\n{message}"
    if len(message) > LONGEST:
        return f"its message has {len(message)} characters"
    try:
        message.encode()
        msgspec.json.encode([str(problem) for problem in refused.problems])
    except UnicodeEncodeError as why:
        return f"its message can be neither printed nor sent: {why}"
    return ""


def fuzz(
    name: str, read: Callable[[bytes], object], samples: Sequence[Sample], count: int, seed: int = 0
) -> Outcome:
    """Read ``count`` changed files; AssertionError with the smallest failing one that was found."""
    outcome = Outcome()
    began = time.process_time()
    with bounded():
        for number in range(count):
            if number % _SETTLED == 0:
                _settle()
            made = f"{name}:{seed}:{number}"
            data = mutated(samples, made)
            start = time.thread_time()
            code, wrong = fault(read, data)
            outcome.slowest = max(outcome.slowest, time.thread_time() - start)
            if wrong:
                small = shrunk(data, lambda part: bool(fault(read, part)[1]))
                wrong = fault(read, small)[1] or wrong
                raise AssertionError(f"{name}: {wrong}\nmutation {made!r}\n{repro(small)}")
            outcome.codes[code] += 1
    outcome.seconds = time.process_time() - began
    return outcome


def shrunk(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """The data without the ranges that the failure does not need: halves first, then less."""
    tries, size = 0, len(data) // 2
    while size:
        start = 0
        while start < len(data) and tries < _SHRINKING:
            tries += 1
            less = data[:start] + data[start + size :]
            if fails(less):
                data = less
            else:
                start += size
        size //= 2
    return data


def repro(data: bytes) -> str:
    """The bytes as they can be pasted into a test."""
    if len(data) <= 600:
        return f"data = {data!r}"
    packed = base64.b85encode(zlib.compress(data, 9)).decode()
    return f"data = zlib.decompress(base64.b85decode({packed!r}))  # {len(data)} bytes"
