"""A plan as one HTML file: no network, no script, every text from a model escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fxpart import units
from fxpart.plan.model import Plan
from fxpart.report import comparison_text, sharding
from fxpart.report.comparison import RecordingComparison
from fxpart.report.comparison_builder import predict_timeline
from fxpart.report.explanation import Explanation, RejectedAlternative
from fxpart.report.explanation_builder import explanation
from fxpart.report.explanation_text import (
    certificate,
    describe_method,
    memory_words,
    pace_words,
    rejected_rows,
    schedule,
    stream_words,
)
from fxpart.report.overlay import drawn, overlay_svg
from fxpart.report.stage_tables import (
    degrees,
    has_gradient_buckets,
    has_weight_copies,
    stream_rows,
)
from fxpart.report.style import CSS
from fxpart.report.svg import PARTS, memory_svg, timeline_svg
from fxpart.report.table import shortened
from fxpart.report.timeline import plan_timeline, streams
from fxpart.schedule.measured_timeline import MeasuredTimeline
from fxpart.schedule.spec import find_built

# Computations that the timeline draws at most; a larger schedule is drawn with fewer microbatches.
DRAWN = 12_000


def report_html(
    plan: Plan,
    recording: MeasuredTimeline | None = None,
    comparison: RecordingComparison | None = None,
) -> str:
    """The whole file, below a megabyte, as text.

    recording, comparison: of steps by the plan and what :func:`.compared.compare` says of them.
    """
    title = shortened(f"{plan.model.name} on {plan.cluster.name}", 120)
    found = explanation(plan)
    body = "\n".join(
        (
            _head(plan), _cards(plan, found), _measured(plan, recording, comparison),
            _timeline(plan), _step(found), _memory(plan, found),
            _stream(found), _stages(found), _sharding(plan), _certificate(plan),
            _rejected("Rejected", found.rejected),
            _rejected("With one decision changed", found.changes), _ties(plan),
            _pairs("Where the costs come from", plan.provenance),
            _pairs("Fixed by you", {k: str(v) for k, v in plan.constraints.items()}),
        )
    )  # fmt: skip
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{escape(title)} - fxpart</title>
<style>{CSS}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _head(plan: Plan) -> str:
    model = plan.model
    words = (
        f"{units.count(model.parameters)} parameters in {model.blocks} blocks, cut into "
        f"{len(plan.stages)} stages on {plan.world} ranks of {plan.cluster.name}"
    )
    return f'<h1>{escape(shortened(model.name, 120))}</h1>\n<p class="lead">{escape(words)}</p>'


def _cards(plan: Plan, found: Explanation) -> str:
    step = found.step
    rate = step.samples_per_second
    cards = (
        ("predicted step", units.seconds(step.seconds)),
        (f"by {describe_method(step.method)}", units.seconds(step.simulated_seconds)),
        *([("when run", units.seconds(step.rehearsed_seconds))] if step.rehearsed_seconds else []),
        ("samples a second", "-" if rate is None else f"{rate:.4g}"),
        ("batch x microbatches", f"{plan.batch_size} in {plan.microbatches}"),
        ("schedule", schedule(plan)),
        ("bubble", units.percent(step.bubble)),
        ("slowest stage over mean", f"{found.bottleneck.of_mean:.2f}"),
        ("fullest rank", units.percent(found.fullest.used)),
    )
    items = "".join(f"<div><dt>{k}</dt><dd>{escape(v)}</dd></div>" for k, v in cards)
    return f'<dl class="cards">{items}</dl>'


def _measured(
    plan: Plan, recording: MeasuredTimeline | None, found: RecordingComparison | None
) -> str:
    if recording is None or found is None:
        return ""
    names = (("f0", "forward"), ("b0", "backward"), ("m2", "once a step"), ("t", "transfer"))
    key = _key((*names, ("idle", "waiting")))
    caption = "Of each rank the predicted step above and below it a measured one of median length."
    if len(drawn(recording)) < len(recording.ranks):
        caption += f" {len(drawn(recording))} of the {len(recording.ranks)} ranks are drawn."
    words = [comparison_text.headline(found), *found.notes]
    text = "".join(f"<p>{escape(line)}</p>" for line in words)
    heads, rows = comparison_text.stage_rows(found)
    told = "".join(f"<li>{escape(line)}</li>" for line in comparison_text.differences(found))
    parts = [
        f"<h2>Predicted and measured</h2>\n{text}",
        f"<figure>{overlay_svg(predict_timeline(plan), recording, found)}{key}"
        f"<figcaption>{caption}</figcaption></figure>",
        "<h2>Largest differences</h2>\n"
        f"<p>As rank {comparison_text.pace(found)} spends its step:</p>"
        f"<ul>{told}</ul>",
        f"<h2>By stage</h2>\n{_table(heads, rows, left={2})}",
    ]
    if found.memory:
        heads, rows = comparison_text.memory_rows(found.memory)
        parts.append(f"<h2>Measured memory</h2>\n{_table(heads, rows, left=set())}")
    return "\n".join(parts)


def _timeline(plan: Plan) -> str:
    if find_built(plan.schedule) is None:
        words = f"The schedule {plan.schedule} cannot be drawn yet."
        return f"<h2>Timeline</h2>\n<p>{words}</p>"
    whole = 2 * len(plan.stages) * plan.microbatches
    drawn = plan.microbatches
    if whole > DRAWN:
        drawn = max(1, DRAWN // (2 * len(plan.stages)))
    timeline = plan_timeline(plan, microbatches=drawn)
    caption = "One step by the predicted costs."
    if streams(plan):
        caption = "Three minibatches of the stream, and its end, by the predicted costs."
    if drawn < plan.microbatches:
        caption += f" Drawn with {drawn} of its {plan.microbatches} microbatches."
    names = (("f0", "forward"), ("b0", "backward"), ("m2", "once a step"), ("t", "transfer"))
    key = _key((*names, ("idle", "waiting")))
    return (
        f"<h2>Timeline</h2>\n<figure>{timeline_svg(timeline)}{key}"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _step(found: Explanation) -> str:
    rows = [
        (name, units.seconds(seconds), units.percent(found.step.shares[name]))
        for name, seconds in found.step.parts.named().items()
        if seconds
    ]
    words = "".join(f"<p>{escape(line)}</p>" for line in pace_words(found))
    return f"<h2>Where the step goes</h2>\n{words}{_table(('', 'seconds', 'share'), rows, {0})}"


def _memory(plan: Plan, found: Explanation) -> str:
    left_out = {"copies": not has_weight_copies(found), "sums": not has_gradient_buckets(found)}
    held = [i for i, name in enumerate(PARTS) if not left_out.get(name)]
    key = _key([(f"m{i}", PARTS[i]) for i in held])
    caption = "The line is the limit of the rank."
    words = "".join(f"<p>{escape(line)}</p>" for line in memory_words(found))
    return (
        f"<h2>Peak memory</h2>\n<figure>{memory_svg(plan)}{key}"
        f"<figcaption>{caption}</figcaption></figure>{words}"
    )


def _stream(found: Explanation) -> str:
    given = found.asynchrony
    if given is None:
        return ""
    words = "".join(f"<p>{escape(line)}</p>" for line in stream_words(given))
    heads, *rows = stream_rows(given)
    return f"<h2>Asynchronous training</h2>\n{words}{_table(heads, rows, left=set())}"


def _key(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<span><i style="background:var(--{name})"></i>{text}</span>' for name, text in entries
    )
    return f'<div class="key">{items}</div>'


def _stages(found: Explanation) -> str:
    heads = ("stage", "blocks", "holds", "rank", "device", "split", "parameters", "forward",
             "backward", "transfer", "once a step", "in flight")  # fmt: skip
    rows = [
        (
            str(one.stage), shortened(one.blocks, 40), shortened(one.label, 80),
            shortened(one.ranks, 40), shortened(one.devices, 40), degrees(one),
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
        words.append(f"Computed whole by every rank, for want of a rule: {listed}")
    if given.certificate is not None:
        words.append(sharding.describe_certificate(given.certificate))
    text = "".join(f"<p>{escape(word)}</p>" for word in words)
    heads = ("what", "how", "number", "names")
    return f"<h2>Sharding</h2>\n{text}{_table(heads, sharding.rows(given)[:DRAWN], left={0, 1, 3})}"


def _certificate(plan: Plan) -> str:
    badge = "badge" if plan.certificate.status == "optimal" else "badge open"
    words = "".join(f"<p>{escape(line)}</p>" for line in certificate(plan))
    status = f'<p><span class="{badge}">{escape(plan.certificate.status)}</span></p>'
    return f"<h2>How good it is</h2>\n{status}{words}"


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
    return f"<h2>Shared parameters</h2>\n{_table(('names', 'owner', 'stages'), rows, left={0})}"


def _pairs(title: str, pairs: dict[str, str]) -> str:
    if not pairs:
        return ""
    rows = [(shortened(k, 80), shortened(v, 300)) for k, v in sorted(pairs.items())]
    return f"<h2>{title}</h2>\n{_table(('what', 'value'), rows, left={0, 1})}"


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
