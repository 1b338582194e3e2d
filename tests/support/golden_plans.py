"""Plans that a change of structure must not change: their requests, and what is kept of each.

    python tests/support/golden_plans.py             (--only NAME writes one; --check compares)

A file has the plan as JSON without its texts, or the code and the numbers of a refusal. Clusters
are descriptions, so that nothing depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxpart
from fxpart.cluster.devices import Device, Link
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "plans"
# What people read: why and over what a bound holds, labels, sources, advice, model FLOPs.
TEXTS = {
    "why", "over", "label", "what", "provenance", "reason", "reasons", "version", "unfit_seconds",
    "blocks_text", "alternatives", "changes", "source",
    "work",
}  # fmt: skip
DIGITS = 12


@dataclass(frozen=True)
class Case:
    """One request. model: of the zoo, "layers" or "wide". microbatches: None leaves them open."""

    model: str
    cluster: str
    constraints: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class Layers(nn.Module):
    """A first layer, eight of one kind, and a last layer; wide enough to be worth dividing."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 16)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


def unlike(memories: tuple[int, ...], rates: tuple[float, ...], bandwidth: float) -> Cluster:
    """Devices with memories in MiB and rates in TFLOP/s, all on one network."""
    return Cluster(
        name="unlike",
        devices=tuple(
            Device(
                name=f"host{n}/gpu:0", kind="gpu", model=f"card{int(rate)}", host=f"host{n}",
                memory=memory << 20, flops={"float32": rate * 1e12}, bandwidth=rate * 1e11,
                source="formula",
            )
            for n, (memory, rate) in enumerate(zip(memories, rates, strict=True))
        ),
        links=(Link(source="*", target="*", latency=1e-5, bandwidth=bandwidth, kind="net"),),
    )  # fmt: skip


CLUSTERS: dict[str, Callable[[], Any]] = {
    "two fast, two slow": lambda: unlike((1024,) * 4, (2.0, 2.0, 1.0, 1.0), 4e9),
    "one fast, three slow": lambda: unlike((1024,) * 4, (3.0, 1.0, 1.0, 1.0), 1e9),
    "little memory": lambda: unlike((9, 9, 9, 9), (1.0,) * 4, 4e9),
    "no memory": lambda: unlike((1, 1), (1.0, 1.0), 4e9),
}
WIDTHS = {"layers": (256, 16), "wide": (2048, 4096)}  # and rows of the batch
CHAIN = {"mesh": "none"}
ASYNC = {"mode": "async", "mesh": "none", "stages": 3}

CASES: dict[str, Case] = {
    # chains of one rank for each stage
    "chain_layers": Case("layers", "1x4xa100", CHAIN),
    "chain_mlp": Case("mlp", "1x2xh100", CHAIN, 4),
    "chain_gpt2": Case("gpt2", "1x4xa100", CHAIN, 2),
    "chain_t5": Case("t5", "2x2xa100", {**CHAIN, "stages": 3}, 2),
    "chain_unet": Case("unet", "1x4xa100", {**CHAIN, "stages": 4}),
    "chain_lstm_of_one_size": Case("lstm", "1x2xa100", {**CHAIN, "stages": 2}),
    "chain_resnet_of_one_microbatch": Case("resnet50", "1x2xa100", {**CHAIN, "stages": 2}),
    "chain_cp_sat": Case("layers", "1x4xa100", {**CHAIN, "stages": 3, "solver": "cp-sat"}, 8),
    "chain_little_memory": Case("layers", "little memory", CHAIN, 4),
    # meshes
    "mesh_data_tensor": Case("gpt2", "1x4xa100", {"mesh": "dp=2,tp=2"}),
    "mesh_data_stages": Case("layers", "1x4xa100", {"mesh": "dp=2", "stages": 2}, 4),
    "mesh_zero_1": Case("layers", "1x4xa100", {"mesh": "dp=4", "zero": 1}, 2),
    "mesh_zero_2": Case("layers", "2x2xa100", {"mesh": "dp=2", "stages": 2, "zero": 2}, 2),
    "mesh_zero_3": Case("gpt2", "1x2xa100", {"mesh": "dp=2", "zero": 3}),
    "mesh_experts": Case("mixtral", "1x2xa100", {"mesh": "ep=2"}),
    "mesh_bf16": Case("layers", "1x2xa100", {"mesh": "tp=2", "precision": "bf16"}),
    # every degree open
    "free_layers": Case("layers", "1x4xa100"),
    "free_wide": Case("wide", "1x4xa100"),
    "free_wide_two_hosts": Case("wide", "2x2xa100"),
    "free_gpt2": Case("gpt2", "2x2xa100"),
    "free_recommender": Case("recommender", "1x4xa100"),
    # unlike devices and copies of stages
    "unlike_chain": Case("layers", "two fast, two slow", CHAIN, 8),
    "unlike_free": Case("layers", "two fast, two slow", {}, 8),
    "unlike_wide": Case("wide", "two fast, two slow"),
    "unlike_copies": Case("wide", "two fast, two slow", {"copies": "always", "stages": 2}, 16),
    "unlike_one_copy": Case("wide", "two fast, two slow", {"copies": "always"}, 16),
    "like_copies": Case("wide", "1x4xa100", {"copies": "always"}, 16),
    # asynchronous modes and queues
    **{
        f"async_{name.replace('-', '_')}": Case("layers", "1x4xa100", {**ASYNC, "weights": name}, 4)
        for name in ("spectrain", "stash", "2bw", "pipemare", "xpipe", "nadam-stash")
    },
    "async_free": Case("gpt2", "1x4xa100", {"mode": "async"}),
    "faster_of_both": Case("layers", "1x4xa100", {"mode": "auto"}, 4),
    "queue_wide": Case("wide", "one fast, three slow", {"mode": "queue"}, 8),
    "queue_copies": Case("wide", "two fast, two slow", {"mode": "queue", "stages": 2}, 8),
    "queue_stash": Case("layers", "1x4xa100", {"mode": "queue", "weights": "stash"}, 8),
    # schedules
    "interleaved": Case(
        "layers", "1x2xa100", {**CHAIN, "schedule": "interleaved", "virtual": 2}, 4
    ),
    "breadth_first": Case("layers", "1x2xa100", {**CHAIN, "schedule": "breadth-first"}, 4),
    "zero_bubble": Case("layers", "1x4xa100", {**CHAIN, "stages": 4, "schedule": "zb-h1"}, 8),
    "zero_bubble_v": Case("layers", "1x2xa100", {**CHAIN, "schedule": "zb-v"}, 4),
    "all_at_once": Case("layers", "1x2xa100", {**CHAIN, "stages": 2, "schedule": "gpipe"}, 4),
    "searched_schedule": Case("layers", "1x2xa100", {**CHAIN, "stages": 2, "schedule": "found"}, 4),
    # decisions that the user fixes or forbids
    "fixed_stages_of_blocks": Case(
        "layers", "1x4xa100", {**CHAIN, "stages": 3, "stage": "first=0;layers.0=1;last=2"}, 4
    ),
    "fixed_layout": Case("layers", "1x4xa100", {"layout": "Etttt|ttttL", "mesh": "none"}, 4),
    "fixed_degrees": Case("wide", "1x4xa100", {"mesh": "auto", "tp": 2, "dp": 2, "zero": 1}),
    "forbidden_data": Case("wide", "1x4xa100", {"mesh": "auto", "forbid": "dp"}),
    "forbidden_cut": Case(
        "layers", "1x4xa100", {**CHAIN, "stages": 2, "forbid": "cut=layers.3"}, 4
    ),
    "annotated": Case("layers", "1x2xa100", {
        "mesh": "tp=2", "annotations": '[annotations]\n"layers.*.weight" = "tp:S(0)"\n'}),
    # requests that nothing fits
    "refused_memory": Case("layers", "no memory", CHAIN, 2),
    "refused_memory_free": Case("layers", "no memory"),
    "refused_stages": Case("layers", "1x2xa100", {**CHAIN, "stages": 3}, 2),
    "refused_block": Case("layers", "1x2xa100", {**CHAIN, "stage": "nosuch=0"}),
    "refused_coupling": Case("resnet50", "1x2xa100", {**CHAIN, "stages": 2}, 4),
    "refused_mesh": Case("layers", "1x2xa100", {"mesh": "dp=3"}),
}  # fmt: skip


@cache
def captured(name: str, precision: str = "fp32") -> fxpart.Program:
    """The model on one device; plans for other clusters are made from what was captured."""
    options: dict[str, Any] = {"constraints": {"precision": precision}}
    if name in WIDTHS:
        torch.manual_seed(0)
        width, rows = WIDTHS[name]
        batch = torch.randn(rows, 64), torch.randn(rows, 16)
        return fxpart.compile(
            Layers(width), "1x1xa100", example_inputs=batch, loss=nn.MSELoss(), **options
        )
    from zoo import ZOO

    built = ZOO[name].build()
    return fxpart.compile(
        built.model, "1x1xa100", example_inputs=built.batch, loss=built.loss,
        batch_dims=built.batch_dims, **options,
    )  # fmt: skip


@cache
def program_of(name: str) -> fxpart.Program:
    """Plan the case of this name; FxpartError for a request that nothing fits."""
    case = CASES[name]
    cluster = CLUSTERS[case.cluster]() if case.cluster in CLUSTERS else case.cluster
    return captured(case.model, case.constraints.get("precision", "fp32")).replan(
        cluster, microbatches=case.microbatches, constraints=dict(case.constraints), **case.options
    )


def made(name: str) -> dict[str, Any]:
    """Return the stored parts of the plan, or of the refusal."""
    try:
        program = program_of(name)
    except FxpartError as refused:
        return {"refused": [_numbers(problem) for problem in refused.problems]}
    held: dict[str, Any] = _kept(json.loads(program.plan.dumps()))
    return held


def _numbers(problem: Any) -> list[str]:
    """The code of a problem and the numbers in its texts, in order."""
    texts = f"{problem.where} {problem.why}"
    return [problem.code, *re.findall(r"\d+(?:\.\d+)?", texts)]


def _kept(value: Any) -> Any:
    """The value without texts, with floats rounded to so many digits that every machine has."""
    if isinstance(value, dict):
        return {k: _kept(v) for k, v in value.items() if k not in TEXTS and k != "cluster"}
    if isinstance(value, list):
        return [_kept(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def text_of(held: Mapping[str, Any]) -> str:
    """As it is in the file: a line for each top-level field."""
    rows = (f" {json.dumps(k)}: {json.dumps(held[k], sort_keys=True)}" for k in sorted(held))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def path_of(name: str) -> Path:
    """The file of a case."""
    return FOLDER / f"{name}.json"


def main() -> None:
    """Write the files, or compare with them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names, with commas between them")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(CASES)
    different = []
    for name in names:
        text = text_of(made(name))
        if options.check and path_of(name).read_text() != text:
            different.append(name)
        elif not options.check:
            path_of(name).write_text(text)
    sys.exit(f"different: {', '.join(different)}" if different else 0)


if __name__ == "__main__":
    main()
