"""fxpart partitions a PyTorch model over devices and trains it with the results of single-process
training.

The public names are loaded when they are first used, so that ``import fxpart`` and reading a plan
file take no torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpart._version import __version__

if TYPE_CHECKING:
    from fxpart import capture
    from fxpart.annotations import annotate
    from fxpart.api import Program, compile, propose
    from fxpart.capture.workload import Workload
    from fxpart.cluster.devices import Device, Link
    from fxpart.cluster.model import Cluster
    from fxpart.costmodels import register_cost_model
    from fxpart.errors import FxpartError, Problem
    from fxpart.passes.rules import register_op_rule
    from fxpart.plan.model import Plan
    from fxpart.schedule.spec import register_schedule
    from fxpart.schedule.weight_modes import register_weight_mode

# A checkout that is not installed: passes/ and costmodels/ stand beside this package.
if not Path(__file__).with_name("passes").is_dir():
    _root = Path(__file__).resolve().parent.parent
    if any((_root / name / "__init__.py").is_file() for name in ("passes", "costmodels")):
        __path__.append(str(_root))

_LAZY = {
    "Cluster": "fxpart.cluster",
    "Device": "fxpart.cluster",
    "FxpartError": "fxpart.errors",
    "Link": "fxpart.cluster",
    "Plan": "fxpart.plan",
    "Problem": "fxpart.errors",
    "Program": "fxpart.api",
    "Workload": "fxpart.capture.workload",
    "annotate": "fxpart.annotations",
    "capture": "",  # the package itself: fxpart.capture.capture(model)
    "compile": "fxpart.api",
    "propose": "fxpart.api",
    "register_cost_model": "fxpart.costmodels",
    "register_op_rule": "fxpart.passes.rules",
    "register_schedule": "fxpart.schedule.spec",
    "register_weight_mode": "fxpart.schedule.weight_modes",
}

__all__ = [
    "Cluster",
    "Device",
    "FxpartError",
    "Link",
    "Plan",
    "Problem",
    "Program",
    "Workload",
    "__version__",
    "annotate",
    "capture",
    "compile",
    "propose",
    "register_cost_model",
    "register_op_rule",
    "register_schedule",
    "register_weight_mode",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562); FXP601 if it needs a package that is missing."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'fxpart' has no attribute {name!r}")
    try:
        if not module:
            return importlib.import_module(f"fxpart.{name}")
        value = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as failure:
        from fxpart.errors import find_missing_package

        raise find_missing_package(failure) or failure from failure
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, loaded or not."""
    return sorted(__all__)
