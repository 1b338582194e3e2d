"""The JSON Schema of a plan file, for editors and for other people's tools."""

from __future__ import annotations

from typing import Any

import msgspec

from fxpart.plan import VERSION, Plan


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12; what it cannot say (sums, references) ``Plan.problems`` checks."""
    (reference,), components = msgspec.json.schema_components([Plan], ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"fxpart plan, version {VERSION}",
        **reference,
        "$defs": components,
    }
