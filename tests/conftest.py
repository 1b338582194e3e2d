"""What all tests share."""

from __future__ import annotations

import os

# Threads first: torch reads this when it is imported, and the machine may have two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
