"""The configuration of a transformers model, as its checkpoints hold it."""

from __future__ import annotations

import json
from typing import Any

from torch import nn


def config_text(model: nn.Module) -> str:
    """The text of ``config.json``; empty for a model that was not made from a configuration."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or not hasattr(type(model), "from_pretrained"):
        return ""
    found: dict[str, Any] = json.loads(config.to_json_string())
    found["architectures"] = [type(model).__name__]
    return json.dumps(found, indent=2, sort_keys=True) + "\n"
