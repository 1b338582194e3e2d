"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

# Threads first: torch reads this when it is imported, and the machine may have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from long_tests import is_long
from ranks import Pool

# The same examples on every machine; `make search` looks at new ones. Shrinking whole training
# runs would take longer than a test may: the blob that is printed repeats the failure as it was.
STEADY = tuple(phase for phase in Phase if phase is not Phase.shrink)
settings.register_profile("steady", derandomize=True, print_blob=True, deadline=None, phases=STEADY)
settings.register_profile("search", derandomize=False, print_blob=True, deadline=None)
settings.load_profile("steady")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the longest cases; see tests/long_tests.py."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four rank processes over gloo, kept for the whole run; see tests/ranks.py."""
    made = Pool()
    yield made
    made.close()
