"""The JSON Schema of a plan file, for editors and for other people's tools."""

from __future__ import annotations

from typing import Any

import msgspec

from fxpart.plan.model import VERSION, Plan
from fxpart.plan.number_ranges import FIELDS, PATTERN
from fxpart.schedule.spec import list_schedules
from fxpart.schedule.weight_modes import FLUSH, MODES

_HOLDERS = {
    "devices": "Plan",
    "order": "Plan",
    "stages[].ranks": "Stage",
    "prediction.ranks[].ranks": "RankPrediction",
    "prediction.hosts[].ranks": "HostLoad",
}


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12; what it cannot say (sums, references) ``Plan.problems`` checks."""
    (reference,), components = msgspec.json.schema_components([Plan], ref_template="#/$defs/{name}")
    for field in FIELDS:
        _runs(components[_HOLDERS[field]]["properties"][field.rpartition(".")[2]])
    fields = components["Plan"]["properties"]
    fields["schedule"] = {"enum": sorted(list_schedules(trains=True))}
    fields["weights"] = {"enum": sorted(MODES), "default": FLUSH}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fxpart plan, version {VERSION}",
        **reference,
        "$defs": components,
    }


def _runs(field: dict[str, Any]) -> None:
    """Numbers may stand as a list too, as they do in memory."""
    numbers = {"type": field.pop("type"), "items": field.pop("items")}
    field.pop("default", None)
    field["anyOf"] = [{"type": "string", "pattern": f"^{PATTERN}$"}, numbers]
