"""The fingerprint: equal across processes, different for every relevant change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fxpart.passes import PREPARE, all_passes
from inplace_programs import Builder
from ranks import python_path
from torch import fx, nn
from zoo_graphs import captured, prepared

from fxpart.capture.fingerprint import canonical_lines, fingerprint
from fxpart.compiler import PassManager

aten = torch.ops.aten


def graph(
    width: int = 4, op: object = aten.relu.default, name: str = "weight", trained: bool = True,
    p: float = 0.5, rows: int = 3,
) -> fx.GraphModule:  # fmt: skip
    weight = nn.Parameter(torch.ones(width, width), requires_grad=trained)
    builder = Builder(**{name: weight})
    y = builder.call(aten.linear.default, builder.input(rows, width), builder.get(name))
    y = builder.call(aten.dropout.default, builder.call(op, y), p, True)
    return PassManager(all_passes()).run(PREPARE, builder.finish(y))


@pytest.mark.parametrize(
    "change",
    [
        {"width": 5},
        {"op": aten.sin.default},
        {"name": "kernel"},
        {"trained": False},
        {"p": 0.25},
        {"rows": 2},
    ],
)
def test_relevant_changes_show(change: dict[str, object]) -> None:
    a, b = graph(), graph(**change)  # type: ignore[arg-type]
    assert fingerprint(a) != fingerprint(b)
    assert list(canonical_lines(a)) != list(canonical_lines(b))


def test_equal_graphs_do_not_differ() -> None:
    assert fingerprint(graph()) == fingerprint(graph())


def test_node_names_and_devices_do_not_count() -> None:
    a, b = graph(), graph()
    for node in b.graph.nodes:
        if node.op == "call_function":
            node.name = f"{node.name}_other"
    assert fingerprint(a) == fingerprint(b)


@pytest.mark.slow
def test_blocks_count() -> None:
    few = PassManager(all_passes()).run(PREPARE + "{max_blocks=2}", captured("mlp").graph)
    assert fingerprint(few) != fingerprint(prepared("mlp"))


_CODE = """
from zoo_graphs import prepared
from fxpart.capture.fingerprint import fingerprint
print(fingerprint(prepared("side_mask")), fingerprint(prepared("dropouts")))
"""


@pytest.mark.slow
def test_equal_in_another_process_with_another_hash_seed() -> None:
    root = Path(__file__).resolve().parents[2]
    path = python_path(root, root / "tests" / "support")
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", _CODE], capture_output=True, text=True, env=environment, check=True
    )
    here = [fingerprint(prepared(name)) for name in ("side_mask", "dropouts")]
    assert done.stdout.split() == here
