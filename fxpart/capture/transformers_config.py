"""The configuration of a transformers model, in the form that its checkpoints store."""

from __future__ import annotations

import json
from typing import Any

from torch import nn


def config_text(model: nn.Module) -> str:
    """Return the text of ``config.json``; "" for a model without a configuration."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(type(model), "from_pretrained"):
        return ""
    found: dict[str, Any] = json.loads(config.to_json_string())
    found["architectures"] = [type(model).__name__]
    return json.dumps(found, indent=2, sort_keys=True) + "\n"
