"""The tables of plan families: what each accepts, and that the search reaches them by the table."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from structure import ROOT, nodes_of

from fxpart.cluster.model import Cluster
from fxpart.planner.families import (
    MESH_FAMILIES,
    MODE_FAMILIES,
    REPLICA_FAMILIES,
    find_family,
)
from fxpart.planner.request import PlanRequest, make_request

TABLES = (MODE_FAMILIES, REPLICA_FAMILIES, MESH_FAMILIES)
FOLDER = ROOT / "fxpart" / "planner" / "families"


def request(**constraints: Any) -> PlanRequest:
    return make_request(Cluster.local(4), "adam", "auto", constraints, 0)


@pytest.mark.parametrize(
    ("constraints", "accepting"),
    [
        ({}, {"stage degrees"}),
        ({"mode": "queue"}, {"queues"}),
        ({"mode": "async", "mesh": "none"}, {"asynchronous pipeline"}),
        ({"copies": "always"}, {"replicated stages"}),
        ({"copies": "none"}, {"stage degrees"}),
        ({"copies": "always", "tp": 2}, set()),
        ({"schedule": "zb-v"}, {"schedule selection"}),
        ({"schedule": "zb-h1"}, set()),
        ({"schedule": "gpipe,1f1b"}, {"stage degrees"}),
        ({"offload": "both"}, set()),
        ({"zero": 1}, set()),
        ({"tp": 2}, set()),
    ],
)
def test_families_accept_or_say_why_not(constraints: dict[str, Any], accepting: set[str]) -> None:
    asked = request(**constraints)
    for table in TABLES:
        answers = {name: one.accepts(asked, asked.cluster) for name, one in table.items()}
        mine = {name for name, reason in answers.items() if reason is None}
        assert mine == accepting & set(table)
        assert all(reason is None or len(reason) > 10 for reason in answers.values())
        found = find_family(table, asked)
        assert (found.name if found else None) == next((n for n in table if n in mine), None)


def test_every_family_of_the_folder_is_in_a_table() -> None:
    classes = {
        node.name
        for path in FOLDER.glob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Family")
    }
    assert len(classes) > 3
    found = [one for table in TABLES for one in table.values()]
    assert {type(one).__name__ for one in found} == classes
    assert all(table[name].name == name for table in TABLES for name in table)


@pytest.mark.parametrize("module", ["search.py", "mode_selection.py", "mesh_plan.py"])
def test_the_search_imports_no_planner_of_a_family(module: str) -> None:
    """Only the tables, and the functions that tell by which schedules cuts are chosen."""
    path = Path(ROOT / "fxpart" / "planner" / module)
    names = {
        alias.name
        for node in nodes_of(path)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("fxpart.planner.families.")
        for alias in node.names
    }
    assert names <= {"keep_cut_schedules", "requested_schedules", "with_cut_schedules"}
