"""A plan in at most 20 lines, as text and as a small HTML table, from its own fields."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Protocol

from fxpart import units
from fxpart.plan.throughput import Throughput, compute_throughput
from fxpart.schedule.weight_modes import FLUSH

if TYPE_CHECKING:
    from fxpart.plan.model import ModuleCheck, Plan
    from fxpart.plan.prediction import Prediction, RankPrediction

_WIDTH = 160  # characters of a value
_LAYOUTS = 4  # layouts of stages that are listed


class StageLayout(Protocol):
    """The degrees of a stage, as plans and explanations have them."""

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks."""
        ...

    @property
    def tensor_parallel(self) -> int:
        """Tensor-parallel ranks."""
        ...

    @property
    def expert_parallel(self) -> int:
        """Expert-parallel ranks."""
        ...

    @property
    def context_parallel(self) -> int:
        """Context-parallel ranks."""
        ...

    @property
    def shard_degree(self) -> int:
        """Ranks that share ZeRO's shards under hybrid sharding, else 0."""
        ...

    @property
    def zero(self) -> int:
        """ZeRO stage."""
        ...

    @property
    def recompute(self) -> str:
        """Activation recomputation."""
        ...


def summarize(plan: Plan) -> str:
    """Return the plan as text of at most 20 lines."""
    rows = summary_rows(plan)
    width = max(len(name) for name, _ in rows)
    return "\n".join([_title(plan), *(f"  {name:<{width}}  {value}" for name, value in rows)])


def summarize_as_html(plan: Plan) -> str:
    """Return :func:`summarize` as an HTML fragment without style sheets, scripts or links."""
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(value)}</td></tr>'
        for name, value in summary_rows(plan)
    )
    return f"<table><caption>{escape(_title(plan))}</caption><tbody>{rows}</tbody></table>"


def summary_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return the summary as pairs of a label and a value, each on one line."""
    model, certificate = plan.model, plan.degrees or plan.certificate
    rows = [
        ("model", f"{units.count(model.parameters)} parameters "
         f"({units.size(model.parameter_bytes)}), {units.plural(model.nodes, 'op')} in "
         f"{units.plural(model.blocks, 'block')}"),
        ("stages", describe_stages(plan)),
        ("schedule", describe_schedule(plan)),
        ("batch", f"{plan.batch_size} samples in {units.plural(plan.microbatches, 'microbatch')}"),
        ("step time", f"{units.seconds(plan.prediction.expected_seconds)} predicted "
         f"({describe_source(plan.prediction)})"),
        *throughput_rows(compute_throughput(plan)),
        ("pipeline bubble", units.percent(plan.prediction.bubble)),
        ("bound", f"{certificate.status}: objective {units.seconds(certificate.objective)}, lower "
         f"bound {units.seconds(certificate.lower_bound)}, gap {units.percent(certificate.gap)}"),
        ("memory", _memory(max(plan.prediction.ranks, key=used)) + _host_memory(plan)),
        ("verified", describe_check(plan.check)),
    ]  # fmt: skip
    if plan.equivalence is not None:
        rows.append(("results", describe_results(plan)))
    return [(name, _shortened(value)) for name, value in rows]


def throughput_rows(found: Throughput) -> list[tuple[str, str]]:
    """Return the known figures in one row and a row for each figure that is not known."""
    parts = []
    if found.samples_per_second is not None:
        parts.append(f"{format_rate(found.samples_per_second)} samples/s")
    if found.tokens_per_second is not None:
        parts.append(f"{format_rate(found.tokens_per_second)} tokens/s")
    if found.tflops_per_device is not None:
        parts.append(f"{found.tflops_per_device:.3g} TFLOP/s per device")
    if found.mfu is not None:
        parts.append(f"MFU {units.percent(found.mfu)}")
    rows = [("throughput", ", ".join(parts))] if parts else []
    return [*rows, *(("", note) for note in found.notes)]


def describe_schedule(plan: Plan) -> str:
    """Return the schedule with its virtual stages, routing and weight mode."""
    virtual = f" with {plan.virtual} virtual stages per rank" if plan.virtual > 1 else ""
    queues = ", microbatches routed by queues" if plan.staleness else ""
    weights = f", weights {plan.weights}" if plan.weights != FLUSH else ""
    return f"{plan.schedule}{virtual}{queues}{weights}"


def describe_source(given: Prediction) -> str:
    """Return where the step time comes from."""
    if given.rehearsed_seconds:
        return "measured in a trial run"
    if given.corrected_seconds:
        return "simulation, corrected by trial runs of other plans"
    return given.method


def describe_check(check: ModuleCheck | None) -> str:
    """Return what is known of the captured program compared with the module."""
    if check is None:
        return "not recorded"
    if check.status == "passed":
        return "two steps of the captured program equal those of the module"
    if check.status == "off":
        return "no: the captured program was not compared with the module (check=off)"
    return f"no: the captured program was not compared with the module: {check.reason}"


def describe_results(plan: Plan) -> str:
    """Return the promised relation to single-process training, "" where none is recorded."""
    known = plan.equivalence
    if known is None:
        return ""
    text = {
        "bitwise": "bitwise identical to single-process training",
        "rounding": "equal to single-process training up to rounding",
        "per microbatch": "computed per microbatch, not for the whole batch",
    }[known.promise]
    return text + (f": {'; '.join(known.reasons)}" if known.reasons else "")


def used(entry: RankPrediction) -> float:
    """Return the share of its memory limit that a rank needs."""
    return entry.memory.total / entry.memory_limit if entry.memory_limit else 0.0


def layout(stage: StageLayout) -> str:
    """Return a stage's degrees: "dp8 tp4 cp2 ep2 zero1 recompute full"; "-" for one rank."""
    parts = (
        f"dp{stage.data_parallel}" if stage.data_parallel > 1 else "",
        f"tp{stage.tensor_parallel}" if stage.tensor_parallel > 1 else "",
        f"cp{stage.context_parallel}" if stage.context_parallel > 1 else "",
        f"ep{stage.expert_parallel}" if stage.expert_parallel > 1 else "",
        f"zero{stage.zero}" if stage.zero else "",
        f"shard{stage.shard_degree}" if stage.shard_degree else "",
        f"recompute {stage.recompute}" if stage.recompute != "none" else "",
    )
    return " ".join(filter(None, parts)) or "-"


def format_rate(value: float) -> str:
    """Return a rate such as samples/s, with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _title(plan: Plan) -> str:
    ranks = units.plural(plan.world, "rank")
    return _shortened(f"Plan of {plan.model.name} on {plan.cluster.name}: {ranks}")


def describe_stages(plan: Plan) -> str:
    """Return the number of stages, their replicas, and the layouts of their ranks."""
    count = units.plural(len(plan.firsts), "stage")
    if plan.replicas:
        groups = {group[0]: len(set(group)) for group in plan.replicas}
        copies = " + ".join(str(groups.get(first, 1)) for first in plan.firsts)
        count += f" with {copies} replicas"
    layouts = list(dict.fromkeys(map(layout, plan.stages)))
    if layouts == ["-"]:
        return f"{count} x 1 rank"
    listed = ", ".join("1 rank" if one == "-" else one for one in layouts[:_LAYOUTS])
    more = ", ..." if len(layouts) > _LAYOUTS else ""
    return f"{count} x {listed}{more}"


def _memory(entry: RankPrediction) -> str:
    return (
        f"at most {units.size(entry.memory.total)} of {units.size(entry.memory_limit)} per device "
        f"({units.percent(used(entry))}, stage {entry.stage})"
    )


def _host_memory(plan: Plan) -> str:
    """Return what is offloaded, "" without offload."""
    if plan.offload == "none":
        return ""
    most = max(entry.host for entry in plan.prediction.ranks)
    return f", {units.size(most)} per rank on the host (offload={plan.offload})"


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
