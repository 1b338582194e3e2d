"""A published run: its row, its devices and links, and the sizes of its blocks on one rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from fxpart.costmodels.roofline import Roofline
from published_facts import BLOCKED, DOMAINS, GENERATIONS, GRADIENTS
from published_models import share_of_mixtures
from published_ops import BlockShape

from fxpart.cluster.devices import Device, Link
from fxpart.cluster.presets import device_data
from fxpart.schedule.spec import SCHEDULES, ScheduleSpec

MODEL = Roofline()
# Words of printed precisions -> dtype of activations.
DTYPES = {
    "fp32": "float32", "float32": "float32", "tf32": "float32", "bf16": "bfloat16",
    "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "half": "float16",
    "16 bit": "", "16-bit": "", "mixed": "", "amp": "", "fp8": "",
}  # fmt: skip
# Words of printed schedules -> schedules of fxpart, the first that occurs.
NAMES = {
    "interleaved zero": "zb-v", "zbv": "zb-v", "zb-v": "zb-v", "zb": "zb-h1", "zero": "zb-h1",
    "breadth": "breadth-first", "interleaved": "interleaved", "1f1b": "1f1b", "gpipe": "gpipe",
    "pipedream-flush": "1f1b", "all forward": "gpipe", "afab": "gpipe",
}  # fmt: skip
WITHOUT_FUSION = ("pascal", "volta", "turing")  # no fused attention was in use on these


@dataclass(frozen=True)
class PublishedRun:
    """A row of the file with what the prediction needs; sizes per rank follow from the layout.

    peers: whether GPUs of a host read each other's memory.
    """

    row: dict[str, Any]
    device: Device
    near: Link
    far: Link | None
    peers: bool = True

    @property
    def model(self) -> dict[str, Any]:
        """Return the sizes of the model."""
        return dict(self.row["model"])

    @property
    def layout(self) -> dict[str, Any]:
        """Return the layout."""
        return dict(self.row["layout"])

    def degree(self, name: str) -> int:
        """Return the ranks along one axis."""
        return int(self.layout.get(name) or 1)

    @property
    def peak(self) -> float:
        """Return the data sheet's FLOP/s of 16-bit products, float32 where the run uses it."""
        return self.device.flops.get(dtype_of(self)) or self.device.flops["float32"]

    @property
    def zero(self) -> int:
        """Return the ZeRO stage."""
        return int(self.layout.get("zero") or 0)

    @property
    def schedule(self) -> ScheduleSpec:
        """Return fxpart's schedule; raise ValueError for one that it does not have."""
        printed = str(self.layout.get("schedule") or "1f1b").lower()
        printed = printed if self.degree("pp") > 1 else "1f1b"
        name = next((name for word, name in NAMES.items() if word in printed), None)
        if name is None:
            raise ValueError(f"fxpart has no schedule {printed!r}")
        return SCHEDULES[name]

    @property
    def virtual(self) -> int:
        """Return the stages of a rank; where they are not printed, two if the schedule has more."""
        least, most = self.schedule.stages_per_rank
        printed = int(self.layout.get("virtual") or least)
        return max(1, int(min(max(least, printed), most)))

    @property
    def attention(self) -> str:
        """Return "math" (three ops), "fused" (a vendor's training library) or "flash"."""
        old = device_data(self.device.model)["architecture"] in WITHOUT_FUSION
        text = str(self.row.get("attention") or ("math" if old else "fused"))
        return next((kind for kind in ("math", "fused") if text.startswith(kind)), "flash")

    @property
    def eager(self) -> bool:
        """Return whether the run is composed of PyTorch's own unfused ops: FSDP, not compiled."""
        return not self.compiled and self.zero >= 2 and self.attention != "fused"

    @property
    def compiled(self) -> bool:
        """Return whether torch.compile fuses what is elementwise: conversions, masks, dropout."""
        return bool(self.row.get("compile"))

    @property
    def autocast(self) -> bool:
        """Return whether weights are float32 and every op chooses its precision."""
        return self.zero < 2 and ("amp" in self._printed or "autocast" in self._printed)

    @property
    def half(self) -> bool:
        """Return whether apex keeps weights and gradients in 16 bit (its level O2)."""
        return "apex o2" in self._printed

    @property
    def plain(self) -> bool:
        """Return whether attention is written in PyTorch's ops, as in models trained with AMP."""
        return self.attention == "math" and not self.compiled and (self.autocast or self.half)

    @property
    def _printed(self) -> str:
        return str(self.row["precision"].get("printed")).lower()

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of each gradient that is kept."""
        return 2 if self.half else GRADIENTS.get(self.row["source"], 4)

    @property
    def overlaps(self) -> bool:
        """Return whether the gradient reduction runs beside the backward."""
        parallel = max(self.degree("tp"), self.degree("pp")) > 1
        if not self.peers:
            return False
        return self.attention != "math" or not (parallel or self.zero == 1)

    @property
    def recompute(self) -> str:
        """Return "none", "full", "elements" (norms, activations), "attention" or "operations"."""
        text = str(self.row.get("recompute") or "none").lower()
        if text.startswith("selective"):
            words = ("attention", "elements")
            return next((word for word in words if word in text), "operations")
        return "full" if text.startswith(("full", "true", "yes")) else "none"

    @property
    def blocked(self) -> float:
        """Return the seconds of a block's microbatch in which launches wait for the GPU."""
        return BLOCKED.get((self.row["source"], self.row["gpu"]), 0.0)

    def ring(self, ranks: int, stride: int) -> tuple[Link, ...]:
        """Return the links of a group of ranks that are ``stride`` apart."""
        joined = max(int(self.row["gpus_per_host"]), DOMAINS.get(self.device.model, 1))
        inside = max(1, min(ranks, joined // stride))
        hosts = ceil(ranks / inside)
        if ranks <= 1:
            return ()
        if hosts == 1 or self.far is None:
            return (self.near,) * ranks
        return (self.near,) * (ranks - hosts) + (self.far,) * hosts

    def collective(self, kind: str, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of a collective on ``size`` bytes in all, by the name of ``WAYS``."""
        ring = self.ring(ranks, stride)
        return MODEL.reshard(*WAYS[kind], size, ring).seconds if ring else 0.0


WAYS = {
    "all_reduce": ("partial", "replicate"),
    "all_gather": ("shard(0)", "replicate"),
    "reduce_scatter": ("partial", "shard(0)"),
    "all_to_all": ("shard(0)", "shard(1)"),
}


def block_shape(run: PublishedRun) -> BlockShape:
    """Return the sizes of a block on one rank; of one without experts where there are others."""
    model, row = run.model, run.row
    tp, cp = run.degree("tp"), run.degree("cp")
    heads = model["heads"]
    keys = int(row["sequence"])
    return BlockShape(
        samples=ceil(row["microbatch"]),
        queries=-(-keys // cp),
        keys=keys,
        hidden=model["hidden"],
        ffn=-(-model["ffn"] // tp),
        heads=-(-heads // tp),
        kv_heads=-(-model["kv_heads"] // tp),
        head=model["head_dim"],
        dtype=dtype_of(run),
        linear="float8_e4m3fn" if "fp8" in row["precision"]["compute"].lower() else dtype_of(run),
        kind=model["kind"],
        fused_attention=run.attention != "math",
        fused=not run.eager,
        dropout=run.attention == "math" and not run.compiled,
        causal=model["kind"] != "bert",
        shard=tp if is_sequence_parallel(run) else 1,
        generation=GENERATIONS.get(row["source"], 3 if run.attention == "fused" else 2),
        delayed_scaling=run.attention == "fused",
        wide=run.autocast and not run.compiled,
        plain=run.plain,
        value=int(model.get("value_dim") or 0),
        ranks=(int(model.get("q_rank") or 0), int(model.get("kv_rank") or 0)),
    )


def mixture_shape(run: PublishedRun) -> BlockShape | None:
    """Return the sizes of a block with experts on one rank; None if the model has none."""
    model, tp = run.model, run.degree("tp")
    if not share_of_mixtures(model):
        return None
    return replace(
        block_shape(run),
        ffn=-(-model["shared_ffn"] // tp),
        experts=max(1, model["experts"] // run.degree("ep")),
        whole=model["experts"],
        chosen=model["experts_active"],
        width=-(-model["expert_ffn"] // tp),
        capacity=float(model.get("capacity") or 1.0),
    )


def is_sequence_parallel(run: PublishedRun) -> bool:
    """Return whether norms and residuals are divided along the sequence in the tensor group."""
    tensor = run.degree("tp") > 1
    return tensor and (bool(run.layout.get("sp")) or run.model["kind"] == "llama")


def dtype_of(run: PublishedRun) -> str:
    """Return the dtype of activations; raise ValueError for a precision that is not known.

    16 bits of which the kind is not printed are bfloat16, float16 on a GPU without it.
    """
    printed = str(run.row["precision"]["compute"]).lower()
    found = next((dtype for word, dtype in DTYPES.items() if word in printed), None)
    if found is None:
        raise ValueError(f"the precision {printed!r} is not known")
    return found or ("bfloat16" if "bfloat16" in run.device.flops else "float16")
