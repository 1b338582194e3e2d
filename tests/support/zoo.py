"""The zoo: small models of every kind that fxpart must take, with example batches.

Each is seeded, has random weights, and runs in well under a second. ``ZOO[name].build()`` gives a
fresh model; entries whose ``available`` is False need a package that is not installed.
"""

from __future__ import annotations

from zoo_entry import Built, Entry
from zoo_language import LANGUAGE
from zoo_small import SMALL
from zoo_vision import VISION

ZOO: dict[str, Entry] = {**SMALL, **VISION, **LANGUAGE}

__all__ = ["ZOO", "Built", "Entry"]
