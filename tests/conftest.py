"""What all tests share."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

# Threads first: torch reads this when it is imported, and the machine may have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from long_tests import is_long, turn
from ranks import Pool

# Processes that tests start read startup/sitecustomize.py; this one does as they do.
STARTUP = Path(__file__).resolve().parent / "startup"
PATHS = [str(STARTUP), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, PATHS))
gc.set_threshold(50_000, 20, 50)
# CPU seconds; above the limit of the mark, because the first test of a process imports much.
QUICK = 0.5

# The same examples on every machine; `make search` looks at new ones. Shrinking whole training
# runs would take longer than a test may: the blob that is printed repeats the failure as it was.
STEADY = tuple(phase for phase in Phase if phase is not Phase.shrink)
settings.register_profile("steady", derandomize=True, print_blob=True, deadline=None, phases=STEADY)
settings.register_profile("search", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the longest cases, and begin with the longest files; see tests/support/long_tests.py."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)
    if part := os.environ.get("PART"):
        number, count = map(int, part.split("/"))
        names = sorted({item.path for item in items})
        items[:] = [item for item in items if names.index(item.path) % count == number - 1]
    items.sort(key=lambda item: turn(item.nodeid))


def pytest_collection_finish() -> None:
    """What was imported stays: it is not looked through for garbage again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Record the CPU seconds of a test and of the processes that it waited for."""
    before = sum(os.times()[:4])
    try:
        return (yield)
    finally:
        item.user_properties.append(("cpu seconds", sum(os.times()[:4]) - before))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """After `make quick`, list tests that should be marked as slow."""
    if "not slow" not in config.option.markexpr:
        return
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    taken = {r.nodeid: dict(r.user_properties).get("cpu seconds", 0.0) for r in reports}
    over = sorted(((t, name) for name, t in taken.items() if t > QUICK), reverse=True)
    if over:
        terminalreporter.section(f"over {QUICK} CPU seconds; mark them with @pytest.mark.slow")
        for seconds, name in over:
            terminalreporter.write_line(f"{seconds:5.1f} {name}")


@pytest.fixture(scope="module", autouse=True)
def what_others_left() -> None:
    """Graphs that other files keep are not looked through whenever garbage is collected here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four rank processes over gloo, kept for the whole run; see tests/support/ranks.py."""
    made = Pool()
    yield made
    made.close()
