"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Threads first: torch reads this when it is imported, and the machine may have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four rank processes over gloo, kept for the whole run; see tests/ranks.py."""
    made = Pool()
    yield made
    made.close()
