"""``fxpart explain``: a plan, an error code or a page of the documentation."""

from __future__ import annotations

import re
from importlib.resources import files

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import CODES, error
from fxpart.plan.model import Plan
from fxpart.report.stage_tables import largest

PAGES = (
    "api", "asynchronous_training", "benchmarks", "checkpoint_format", "checkpoints_and_failures",
    "converting_a_script", "custom_ops_and_passes", "errors", "getting_started", "glossary",
    "heterogeneous_devices", "how_a_plan_is_found", "integrations", "numerical_equivalence",
    "other_engines", "parallelism", "planning_for_a_cluster", "schedules", "supported",
    "understanding_a_plan", "what_users_ask_for",
)  # fmt: skip

# Earlier names of pages, with the page that has their content now.
RENAMED = {
    "annotations": "parallelism",
    "asynchronous": "asynchronous_training",
    "checkpoints": "checkpoints_and_failures",
    "clusters": "planning_for_a_cluster",
    "elastic": "checkpoints_and_failures",
    "failures": "checkpoints_and_failures",
    "heterogeneous": "heterogeneous_devices",
    "how_it_chooses": "how_a_plan_is_found",
    "learning": "asynchronous_training",
    "measured": "benchmarks",
    "one_process": "numerical_equivalence",
    "postmortem": "checkpoints_and_failures",
    "precision": "converting_a_script",
    "prediction": "asynchronous_training",
    "profiling": "planning_for_a_cluster",
    "reading_a_plan": "understanding_a_plan",
    "reading_a_run": "understanding_a_plan",
    "rules": "custom_ops_and_passes",
    "surviving": "checkpoints_and_failures",
    "training": "converting_a_script",
}


@click.command()
@click.argument("subject")
@click.argument("name", required=False)
@click.option("--memory", is_flag=True, help="List the ten largest tensors at each rank's peak.")
@json_option
def command(subject: str, name: str | None, memory: bool, as_json: bool) -> int:
    """Explain SUBJECT: a plan file, an error code such as FXP204, or a page of the documentation.

    With a plan and NAME (an input, a weight, a node of the graph): the origin of its placements.
    Pages: `api`, `asynchronous_training`, `benchmarks`, `checkpoint_format`,
    `checkpoints_and_failures`, `converting_a_script`,
    `custom_ops_and_passes`, `errors`, `getting_started`, `glossary`, `heterogeneous_devices`,
    `how_a_plan_is_found`, `integrations`, `numerical_equivalence`, `other_engines`, `parallelism`,
    `planning_for_a_cluster`, `schedules`, `supported`, `understanding_a_plan`.
    """
    if re.fullmatch(r"(?i)fxp\d+", subject):
        return _code(subject.upper(), as_json)
    page = RENAMED.get(subject, subject)
    if page in PAGES:
        if page != subject:
            output.note(f"The page '{subject}' is now part of '{page}'.")
        _page({"subject": page}, f"{page}.md", as_json)
        return 0
    plan = Plan.load(subject)
    if memory:
        return _memory(plan, as_json)
    if name is not None:
        return _why(plan, name, as_json)
    if as_json:
        from fxpart.report.explanation_builder import explanation

        output.data(explanation(plan))
        return 0
    from fxpart.report.explanation_text import explain

    output.text(explain(plan).rstrip("\n"))
    return 0


def _memory(plan: Plan, as_json: bool) -> int:

    lines = largest(plan)
    if as_json:
        rows = plan.prediction.ranks
        output.data([{"stage": r.stage, "peak": r.peak, "top": r.top} for r in rows])
    else:
        output.text(lines)
    return 0


def _why(plan: Plan, name: str, as_json: bool) -> int:
    from fxpart.report.sharding import explain_placement

    text = explain_placement(plan, name)
    if as_json:
        assert plan.sharding is not None, "checked by explain_placement"
        output.data([entry for entry in plan.sharding.placed if name in entry.names])
    else:
        output.text(text)
    return 0


def _code(code: str, as_json: bool) -> int:
    if code not in CODES:
        near = [known for known in CODES if known[:4] == code[:4]] or list(CODES)
        fix = f"use one of {', '.join(near)}"
        raise error("FXP109", where=f"explain {code}", why="this code is unknown", fix=fix)
    title, status = CODES[code]
    _page({"code": code, "title": title, "exit_status": status}, f"errors/{code}.md", as_json)
    return 0


def _page(about: dict[str, object], path: str, as_json: bool) -> None:
    page = files("fxpart").joinpath("docs", *path.split("/")).read_text(encoding="utf-8")
    if as_json:
        output.data({**about, "page": page})
    else:
        output.text(page.rstrip("\n"))
