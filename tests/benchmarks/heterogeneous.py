"""Clusters of unlike devices: the plan for all of one beside the best plan for each kind alone.

    python tests/benchmarks/heterogeneous.py        (--models gpt2 --clusters 4 for a try)

Twenty clusters (two types of GPU, one slower device, some with half the memory, a slow link in the
middle, GPUs that CPUs with much memory feed) and six models on the meta device: GPT-2, Llama, BERT,
ViT, ResNet-50, a recommender whose tables fit no GPU's half. For each the simulated step of the
plan, of the best plan on the devices of each kind by themselves, and how the plan uses the devices.
Ends with status 1 where a plan is slower than one of these. Nothing is run, so that any machine
will do; ``--keep FILE`` keeps the rows as they come, and goes on from what is in it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from record import parser, write

from fxpart.cluster.devices import Link
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

_TOLERANCE = 1e-9
_UNFIT = ("FXP202", "FXP204")  # no plan fits; anything else is a mistake


def slower(cluster: Cluster, which: list[int], factor: float, name: str) -> Cluster:
    """The cluster with some devices slower by a factor, and so of another kind."""
    devices = list(cluster.devices)
    for index in which:
        one = devices[index]
        devices[index] = msgspec.structs.replace(
            one, model=f"{one.model}-slow", bandwidth=one.bandwidth * factor,
            flops={kind: rate * factor for kind, rate in one.flops.items()},
        )  # fmt: skip
    return msgspec.structs.replace(cluster, devices=tuple(devices), name=name)


def less_memory(cluster: Cluster, which: list[int], name: str) -> Cluster:
    """The cluster with some devices of half the memory."""
    devices = list(cluster.devices)
    for index in which:
        devices[index] = msgspec.structs.replace(devices[index], memory=devices[index].memory // 2)
    return msgspec.structs.replace(cluster, devices=tuple(devices), name=name)


def between(cluster: Cluster, bandwidth: float, name: str) -> Cluster:
    """The cluster with another link between its hosts."""
    inside = [link for link in cluster.links if link.source != "*"]
    link = Link(source="*", target="*", latency=5e-5, bandwidth=bandwidth, kind="net")
    return msgspec.structs.replace(cluster, links=(*inside, link), name=name)


def clusters() -> dict[str, Cluster]:
    """Twenty, by name."""
    parse = Cluster.parse
    cpus = parse("4xcpu")
    rich = [msgspec.structs.replace(d, memory=512 * 10**9) for d in cpus.devices]
    feeding = msgspec.structs.replace(cpus, devices=tuple(rich))
    found = [parse(text) for text in (
        "4xh100+4xa100", "2xh100+2xa100", "1xh100+3xa100", "4xh100+2xl4", "2xa100+4xt4",
        "2xv100+2xt4", "1xh200+4xl40s", "2xmi300x+2xh100", "1xa100+2xrtx-4090",
    )]  # fmt: skip
    found += [
        slower(parse("4xa100"), [3], 0.5, "4xa100, one at half speed"),
        slower(parse("4xh100"), [0], 0.25, "4xh100, the first at a quarter"),
        slower(parse("8xv100"), [2, 5], 0.7, "8xv100, two at 0.7"),
        less_memory(parse("4xa100"), [1], "4xa100, one with half the memory"),
        less_memory(parse("4xt4"), [2, 3], "4xt4, two with half the memory"),
        between(parse("2xh100+2xa100"), 1.25e8, "2xh100+2xa100 over 1 Gbit/s"),
        between(parse("2x2xv100+2xt4"), 1.25e9, "2x2xv100+2xt4 over 10 Gbit/s"),
        between(parse("4xa100+4xl4"), 1.25e9, "4xa100+4xl4 over 10 Gbit/s"),
        _joined(feeding, parse("1xt4"), "4 CPUs and a T4"),
        _joined(feeding, parse("2xl4"), "4 CPUs and 2 L4"),
        _joined(feeding, less_memory(parse("1xv100"), [0], "v100"), "4 CPUs and half a V100"),
    ]
    return {cluster.name: cluster for cluster in found}


def _joined(first: Cluster, second: Cluster, name: str) -> Cluster:
    """Two clusters that PCI express joins."""
    hosts = [(part, f"part{number}") for number, part in enumerate((first, second))]
    devices = [
        msgspec.structs.replace(d, name=f"{host}/{d.kind}:{k}", host=host)
        for part, host in hosts
        for k, d in enumerate(part.devices)
    ]
    link = Link(source="*", target="*", latency=1e-5, bandwidth=2.5e10, kind="pcie")
    return Cluster(name=name, devices=tuple(devices), links=(link,)).validate()


def language(name: str) -> Any:
    """GPT-2, Llama, BERT or ViT of their small sizes, with a batch of 32, on the meta device."""
    import torch
    import transformers as hf

    ids = torch.zeros(32, 128, dtype=torch.int64)
    both = {"input_ids": ids, "labels": ids}
    with torch.device("meta"):
        if name == "gpt2":
            return hf.GPT2LMHeadModel(hf.GPT2Config()), both
        if name == "llama":
            config = hf.LlamaConfig(
                hidden_size=1024, intermediate_size=2752, num_hidden_layers=12,
                num_attention_heads=16, vocab_size=32000,
            )  # fmt: skip
            return hf.LlamaForCausalLM(config), both
        if name == "bert":
            return hf.BertForMaskedLM(hf.BertConfig()), both
        pictures = torch.zeros(32, 3, 224, 224)
        labels = torch.zeros(32, dtype=torch.int64)
        made = hf.ViTForImageClassification(hf.ViTConfig(num_labels=1000))
        return made, {"pixel_values": pictures, "labels": labels}


def resnet50(_: str) -> Any:
    """ResNet-50 on 224 x 224 pixels."""
    import torch
    from zoo_vision import ResNet50

    with torch.device("meta"):
        model = ResNet50(width=64, classes=1000)
    return model, (torch.zeros(32, 3, 224, 224), torch.zeros(32, dtype=torch.int64))


def recommender(_: str) -> Any:
    """Tables of 4 GB in all, bags of 20 ids, towers."""
    import torch
    from cpu_models import Towers

    with torch.device("meta"):
        model = Towers(items=8_000_000, width=64, inner=2048)
    batch = (
        torch.zeros(4096, dtype=torch.int64), torch.zeros(4096, 20, dtype=torch.int64),
        torch.zeros(4096, dtype=torch.int64), torch.zeros(4096, 5, dtype=torch.int64),
        torch.zeros(4096),
    )  # fmt: skip
    return model, batch


MODELS: dict[str, Callable[[str], Any]] = {
    "gpt2": language, "llama": language, "bert": language, "vit": language,
    "resnet50": resnet50, "recommender": recommender,
}  # fmt: skip


def captured(name: str) -> Any:
    """The model compiled for one large device, to be planned again for others."""
    from torch.nn import functional

    import fxpart

    model, batch = MODELS[name](name)
    given: Any = {"example_kwargs" if isinstance(batch, dict) else "example_inputs": batch}
    if name in ("resnet50", "recommender"):
        given["loss"] = (
            functional.cross_entropy if name == "resnet50"
            else functional.binary_cross_entropy_with_logits
        )  # fmt: skip
    return fxpart.compile(model.train(), "1xh200", optimizer="adamw", **given)


def row(program: Any, cluster: Cluster) -> dict[str, Any]:
    """One model on one cluster."""
    from fxpart.pricing.device_limits import group_by_kind

    began = time.process_time()
    plan = program.replan(cluster).plan
    seconds = time.process_time() - began
    types = group_by_kind(cluster)[1]
    alone: dict[str, float | None] = {}
    members: dict[tuple[int, int], list[int]] = {}
    for place, (type_, device) in enumerate(zip(types, cluster.devices, strict=True)):
        members.setdefault((type_, device.memory), []).append(place)
    for places in members.values():
        part = cluster.part(places)
        name = f"{len(places)} {part.devices[0].model}"
        try:
            found = program.replan(part, constraints={"copies": "none"}).plan
            alone[name] = found.prediction.simulated_seconds
        except FxpartError as fault:
            alone[name] = None
            if fault.code not in _UNFIT:
                raise
    best = min((s for s in alone.values() if s is not None), default=None)
    mine = plan.prediction.simulated_seconds
    return {
        "plan_seconds": mine,
        "one_kind_seconds": alone,
        "over_best": None if best is None else best / mine,
        "how": plan.provenance["kinds"].split(":")[0],
        "devices": [stage.device for stage in plan.stages for _ in stage.ranks],
        "planning_cpu_seconds": round(seconds, 1),
    }


def outcome(program: Any, cluster: Cluster) -> dict[str, Any]:
    """:func:`row`, or why no plan fits."""
    try:
        return row(program, cluster)
    except FxpartError as fault:
        if fault.code not in _UNFIT:
            raise
        return {"fault": fault.code}


def main() -> int:
    """All pairs."""
    options = parser(__doc__)
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--clusters", type=int, default=20, help="the first so many")
    options.add_argument("--keep", type=Path, help="a file of rows to go on from")
    given = options.parse_args()
    kept: Path | None = given.keep
    rows = json.loads(kept.read_text()) if kept is not None and kept.exists() else []
    known = {(r["model"], r["cluster"]) for r in rows}
    names, some = given.models.split(","), list(clusters().items())[: given.clusters]
    for name in names:
        missing = [each for each in some if (name, each[0]) not in known]
        program = captured(name) if missing else None
        for words, cluster in missing:
            rows.append({"model": name, "cluster": words, **outcome(program, cluster)})
            sys.stderr.write(f"{name:<12} {words:<34} {rows[-1].get('over_best')}\n")
            if kept is not None:
                kept.write_text(json.dumps(rows))
    given.keep = kept is not None
    wanted = {(name, words) for name in names for words, _ in some}
    rows = [r for r in rows if (r["model"], r["cluster"]) in wanted]
    worse = [
        f"{r['model']} on {r['cluster']}"
        for r in rows
        if (r.get("over_best") or 1.0) < 1 - _TOLERANCE
    ]
    write("heterogeneous", {"rows": rows, "slower_than_one_kind": worse}, given)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
