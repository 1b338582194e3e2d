"""A plan as one HTML file without network access; every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fxpart import units
from fxpart.plan.model import Plan
from fxpart.plan.number_ranges import format_numbers
from fxpart.plan.summary import describe_schedule, layout, throughput_rows
from fxpart.planner.prediction.plan_timeline import plan_timeline, runs_without_flushes
from fxpart.report import comparison_text, sharding
from fxpart.report.comparison import RecordingComparison
from fxpart.report.comparison_builder import predict_timeline
from fxpart.report.explanation import Explanation, RejectedAlternative
from fxpart.report.explanation_builder import explanation
from fxpart.report.explanation_text import (
    asynchrony_lines,
    bottleneck_lines,
    certificate,
    contention_lines,
    memory_lines,
    rejected_rows,
    step_rows,
)
from fxpart.report.overlay import drawn, measured_seconds, overlay_svg
from fxpart.report.page_assets import CSS, SCRIPT, SECURITY_POLICY
from fxpart.report.stage_tables import (
    asynchrony_rows,
    has_gradient_buckets,
    has_weight_copies,
    mode_rows,
)
from fxpart.report.svg import PARTS, memory_svg, timeline_svg
from fxpart.report.table import shortened
from fxpart.schedule.measured_timeline import MeasuredTimeline
from fxpart.schedule.spec import find_built

# Most computations that the timeline draws; a larger schedule is drawn with fewer microbatches.
DRAWN = 12_000


def report_html(
    plan: Plan,
    recording: MeasuredTimeline | None = None,
    comparison: RecordingComparison | None = None,
) -> str:
    """Return the whole file as text of less than a megabyte.

    recording, comparison: measured steps of the plan, and the result of
    :func:`fxpart.report.comparison_builder.compare`. A
    script in the file shows details of a block under the pointer, selects ranks and switches
    between light and dark; without scripts, blocks have short tooltips.
    """
    title = shortened(f"{plan.model.name} on {plan.cluster.name}", 120)
    found = explanation(plan)
    body = "\n".join(
        (
            _head(plan), _cards(plan, found), _measured(plan, recording, comparison),
            _timeline(plan, recording, comparison), _step(found), _memory(plan, found),
            _modes(found), _asynchrony(found), _stages(found), _sharding(plan), _certificate(plan),
            _rejected("Rejected alternatives", found.rejected),
            _rejected("With one decision changed", found.changes), _ties(plan),
            _pairs("Sources of the costs", plan.provenance),
            _pairs("Constraints", {k: str(v) for k, v in plan.constraints.items()}),
        )
    )  # fmt: skip
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{SECURITY_POLICY}">
<title>{escape(title)} - fxpart</title>
<style>{CSS}</style>
</head>
<body>
<main>
{body}
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _head(plan: Plan) -> str:
    model = plan.model
    words = (
        f"{units.count(model.parameters)} parameters in {model.blocks} blocks, divided into "
        f"{len(plan.stages)} stages on {plan.world} ranks of {plan.cluster.name}"
    )
    return f'<h1>{escape(shortened(model.name, 120))}</h1>\n<p class="lead">{escape(words)}</p>'


def _cards(plan: Plan, found: Explanation) -> str:
    step = found.step
    throughput = step.throughput
    cards = [
        ("step time", units.seconds(step.step_time)),
        ("predicted by", step.source),
        ("schedule", describe_schedule(plan)),
        ("batch", f"{plan.batch_size} in {units.plural(plan.microbatches, 'microbatch')}"),
        ("pipeline bubble", units.percent(step.bubble)),
        ("balance (max/mean)", f"{found.bottleneck.balance:.2f}"),
        ("largest memory use", units.percent(found.fullest.used)),
    ]
    rows = throughput_rows(throughput)
    notes = "".join(f'<p class="note">{escape(text)}</p>' for name, text in rows if not name)
    cards += [row for row in rows if row[0]]
    items = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in cards)
    lines = "".join(f'<p class="note">{escape(line)}</p>' for line in contention_lines(found))
    return f'<dl class="cards">{items}</dl>{notes}{lines}'


def _measured(
    plan: Plan, recording: MeasuredTimeline | None, found: RecordingComparison | None
) -> str:
    if recording is None or found is None:
        return ""
    names = (("f0", "forward"), ("b0", "backward"), ("m2", "per step"), ("t", "transfer"))
    key = _key((*names, ("idle", "waiting")))
    caption = "Each rank: the predicted step above, a measured step of median length below."
    if len(drawn(recording)) < len(recording.ranks):
        caption += f" {len(drawn(recording))} of the {len(recording.ranks)} ranks are drawn."
    words = [comparison_text.headline(found), *found.notes]
    text = "".join(f"<p>{escape(line)}</p>" for line in words)
    heads, rows = comparison_text.stage_rows(found)
    listed = "".join(f"<li>{escape(line)}</li>" for line in comparison_text.differences(found))
    rank = comparison_text.bottleneck_rank(found)
    parts = [
        f"<h2>Predicted and measured</h2>\n{text}",
        f"<figure>{overlay_svg(predict_timeline(plan), recording, found)}{key}"
        f"<figcaption>{caption}</figcaption></figure>",
        "<h2>Largest differences</h2>\n"
        f"<p>Rank {rank}, the busiest of the bottleneck stage:</p>"
        f"<ul>{listed}</ul>",
        f"<h2>By stage</h2>\n{_table(heads, rows, left={2})}",
    ]
    if found.memory:
        heads, rows = comparison_text.memory_rows(found.memory)
        parts.append(f"<h2>Measured memory</h2>\n{_table(heads, rows, left=set())}")
    return "\n".join(parts)


def _timeline(
    plan: Plan, recording: MeasuredTimeline | None, comparison: RecordingComparison | None
) -> str:
    if find_built(plan.schedule) is None:
        words = f"The schedule {plan.schedule} has no timeline."
        return f"<h2>Timeline</h2>\n<p>{words}</p>"
    whole = 2 * len(plan.stages) * plan.microbatches
    drawn = plan.microbatches
    if whole > DRAWN:
        drawn = max(1, DRAWN // (2 * len(plan.stages)))
    timeline = plan_timeline(plan, microbatches=drawn)
    caption = "One step under the predicted costs."
    if runs_without_flushes(plan):
        caption = "Three minibatches without flushes, and the end, under the predicted costs."
    if drawn < plan.microbatches:
        caption += f" Drawn with {drawn} of its {plan.microbatches} microbatches."
    names = (("f0", "forward"), ("b0", "backward"), ("m2", "per step"), ("t", "transfer"))
    key = _key((*names, ("idle", "waiting")))
    labels = [format_numbers(stage.ranks) for stage in plan.stages]
    measured = {}
    if recording is not None and comparison is not None:
        measured = measured_seconds(recording, comparison)
    return (
        f"<h2>Timeline</h2>\n<figure>{timeline_svg(timeline, labels, measured)}{key}"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _step(found: Explanation) -> str:
    heads, *rows = step_rows(found)
    text = "".join(f"<p>{escape(line)}</p>" for line in bottleneck_lines(found))
    title = f"Breakdown of the closed form (stage {found.bottleneck.stage})"
    return f"<h2>{title}</h2>\n{text}{_table(heads, rows, {0})}"


def _memory(plan: Plan, found: Explanation) -> str:
    left_out = {"copies": not has_weight_copies(found), "sums": not has_gradient_buckets(found)}
    shown = [i for i, name in enumerate(PARTS) if not left_out.get(name)]
    key = _key([(f"m{i}", PARTS[i]) for i in shown])
    caption = "The line is the memory limit of the rank."
    words = "".join(f"<p>{escape(line)}</p>" for line in memory_lines(found))
    return (
        f"<h2>Peak memory</h2>\n<figure>{memory_svg(plan)}{key}"
        f"<figcaption>{caption}</figcaption></figure>{words}"
    )


def _modes(found: Explanation) -> str:
    if not found.modes:
        return ""
    heads, *rows = mode_rows(found.modes)
    return f"<h2>Modes by time to the target loss</h2>\n{_table(heads, rows, left={0, 1, 8})}"


def _asynchrony(found: Explanation) -> str:
    given = found.asynchrony
    if given is None:
        return ""
    words = "".join(f"<p>{escape(line)}</p>" for line in asynchrony_lines(given))
    heads, *rows = asynchrony_rows(given)
    return f"<h2>Asynchronous pipeline</h2>\n{words}{_table(heads, rows, left=set())}"


def _key(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<span><i style="background:var(--{name})"></i>{text}</span>' for name, text in entries
    )
    return f'<div class="key">{items}</div>'


def _stages(found: Explanation) -> str:
    heads = ("stage", "blocks", "modules", "rank", "device", "layout", "parameters", "forward",
             "backward", "transfer", "per step", "in flight")  # fmt: skip
    rows = [
        (
            str(one.stage), shortened(one.blocks, 40), shortened(one.label, 80),
            shortened(one.ranks, 40), shortened(one.devices, 40), layout(one),
            units.count(one.parameters), units.seconds(one.forward_seconds),
            units.seconds(one.backward_seconds),
            units.seconds(one.transfer_seconds + one.gather_seconds),
            units.seconds(one.step_only_seconds), str(one.in_flight),
        )
        for one in found.by_stage
    ]  # fmt: skip
    return f"<h2>Stages</h2>\n{_table(heads, rows, left={2, 4, 5})}"


def _sharding(plan: Plan) -> str:
    given = plan.sharding
    if given is None:
        return ""
    words = [sharding.headline(plan)]
    if given.unruled:
        listed = ", ".join(f"{name} ({count})" for name, count in sorted(given.unruled.items()))
        words.append(f"Replicated on every rank, without a sharding rule: {listed}")
    if given.certificate is not None:
        words.append(sharding.describe_certificate(given.certificate))
    text = "".join(f"<p>{escape(word)}</p>" for word in words)
    heads = ("kind", "placement", "count", "names")
    return f"<h2>Sharding</h2>\n{text}{_table(heads, sharding.rows(given)[:DRAWN], left={0, 1, 3})}"


def _certificate(plan: Plan) -> str:
    badge = "badge" if plan.certificate.status == "optimal" else "badge open"
    words = "".join(f"<p>{escape(line)}</p>" for line in certificate(plan))
    status = f'<p><span class="{badge}">{escape(plan.certificate.status)}</span></p>'
    return f"<h2>Certificate</h2>\n{status}{words}"


def _rejected(title: str, others: Sequence[RejectedAlternative]) -> str:
    if not others:
        return ""
    heads, *rows = rejected_rows(others)
    return f"<h2>{title}</h2>\n{_table(heads, rows, left={len(heads) - 6, len(heads) - 1})}"


def _ties(plan: Plan) -> str:
    if not plan.ties:
        return ""
    rows = [
        (shortened(" = ".join(tie.names), 160), str(tie.owner), ", ".join(map(str, tie.stages)))
        for tie in plan.ties
    ]
    return f"<h2>Tied parameters</h2>\n{_table(('names', 'owner', 'stages'), rows, left={0})}"


def _pairs(title: str, pairs: dict[str, str]) -> str:
    if not pairs:
        return ""
    rows = [(shortened(k, 80), shortened(v, 300)) for k, v in sorted(pairs.items())]
    return f"<h2>{title}</h2>\n{_table(('name', 'value'), rows, left={0, 1})}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: set[int]) -> str:
    side = [' class="l"' if i in left else "" for i in range(len(heads))]
    top = "".join(f'<th scope="col"{side[i]}>{escape(h)}</th>' for i, h in enumerate(heads))
    body = "\n".join(
        "<tr>" + "".join(f"<td{side[i]}>{escape(c)}</td>" for i, c in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>"
    )
