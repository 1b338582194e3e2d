"""Plans as configurations of other engines, and configurations of other engines as constraints.

`ENGINES` has one entry for each engine: ``fxpart export PLAN --to NAME`` writes its files, and
``fxpart plan TARGET --from FILE`` reads them where the entry has a reader. Neither torch nor
OR-Tools is imported. Packages add engines through the entry point group "fxpart.engines".
"""

from __future__ import annotations

from typing import Any

from fxpart.errors import error
from fxpart.files import read_bytes
from fxpart.interop.engines.engine_spec import EngineConfiguration, EngineRun, EngineSpec
from fxpart.interop.engines.plan_degrees import PlanDegrees, find_degrees
from fxpart.registry import LazyEntry, Registry

__all__ = [
    "ENGINES",
    "EngineConfiguration",
    "EngineRun",
    "EngineSpec",
    "PlanDegrees",
    "find_degrees",
    "read_configuration",
]
_MOST = 1 << 20  # bytes of a configuration file


def _check_engine(name: str, entry: Any) -> None:
    """Raise FXP109 if the object cannot be registered as an engine."""
    if not isinstance(entry, EngineSpec) or entry.name != name:
        raise error(
            "FXP109",
            where=f"engine {name!r}",
            why="The entry is not an EngineSpec of this name.",
            fix="Register an EngineSpec under its own name.",
        )


ENGINES: Registry[EngineSpec] = Registry(
    "engine",
    {
        "torchtitan": LazyEntry("fxpart.interop.engines.torchtitan:TORCHTITAN"),
        "megatron": LazyEntry("fxpart.interop.engines.megatron:MEGATRON"),
        "deepspeed": LazyEntry("fxpart.interop.engines.deepspeed:DEEPSPEED"),
        "accelerate": LazyEntry("fxpart.interop.engines.accelerate:ACCELERATE"),
        "torch-pipelining": LazyEntry("fxpart.interop.engines.torch_pipelining:TORCH_PIPELINING"),
    },
    group="fxpart.engines",
    check=_check_engine,
)


def read_configuration(path: str) -> tuple[EngineSpec, EngineRun]:
    """Return the engine of a file and the file's decisions.

    Raises FXP407 if the file cannot be read, or is of no engine whose files are read.
    """
    readers = [spec for spec in ENGINES.values() if spec.read is not None]
    names = " and ".join(spec.name for spec in readers)
    try:
        text = read_bytes(path, _MOST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise error(
            "FXP407", where=path, why=f"The file cannot be read: {why}.",
            fix=f"Pass a configuration of {names}.",
        ) from why  # fmt: skip
    for spec in readers:
        if spec.read is not None and spec.looks_like is not None and spec.looks_like(text):
            return spec, spec.read(text, path)
    raise error(
        "FXP407", where=path, why=f"The file has no option of {names}.",
        fix="Pass a TOML file of torchtitan, or the arguments of one of them, one per line.",
    )  # fmt: skip
