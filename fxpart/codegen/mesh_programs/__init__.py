"""Stages on several ranks: sharding decisions and the program of each mesh rank.

``sharding_decision`` annotates, propagates and selects placements. ``sharded_graph`` stores the
result and lowers it per mesh rank. ``rank_programs`` splits these graphs into stages.
``plan_placements`` writes placements to a plan and restores them. Meshes and placements are in
:mod:`fxpart.sharding`.
"""

from __future__ import annotations
