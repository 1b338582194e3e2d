"""Where a stage is several ranks: from annotations to the program of each lane.

``decide`` annotates, propagates and chooses; ``graphs`` holds the decided graph and makes each
lane's; ``programs`` cuts those into stages; ``record`` writes the decisions into a plan and reads
them back. Meshes and placements themselves are in :mod:`fxpart.sharding`.
"""

from __future__ import annotations
