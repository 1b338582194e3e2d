"""Readers of other programs' priced graphs; each file says what its fields become."""

from __future__ import annotations

from pathlib import Path

import msgspec

from fxpart.errors import FxpartError, error
from fxpart.files import read_bytes

from ..checks import check_instance
from ..instance import Instance
from .overrides import DeviceOverrides

_LARGEST = 1 << 28  # bytes of a file
_FIX = "give a max-load or Piper JSON file, or a graph.txt of PipeDream's profiler"


def read_instance(path: str | Path, overrides: DeviceOverrides | None = None) -> Instance:
    """The instance in a file, whichever of the formats it is in.

    overrides: what the file leaves out, or what to take in its place. Raises FXP206 for a file that
    cannot be read or is not valid, FXP109 where something has to be given or cannot be.
    """
    where = str(path)
    try:
        data = read_bytes(path, _LARGEST)
    except OSError as failure:
        raise error(
            "FXP206", where=where, why=failure.strerror or str(failure), fix="check the path"
        ) from None
    return parse_instance(data, where, overrides or DeviceOverrides())


def parse_instance(data: bytes, where: str, overrides: DeviceOverrides) -> Instance:
    """The instance in the bytes of a file; ``where`` names it in errors."""
    if data.lstrip()[:1] not in (b"{", b"["):
        from .pipedream import parse
    elif b'"maxFPGAs"' in data or b'"maxSizePerFPGA"' in data:
        from .maxload import parse
    elif b'"TMPCs"' in data or b'"maxDevices"' in data:
        from .piper import parse
    else:
        raise error("FXP206", where=where, why="it is in none of the known formats", fix=_FIX)
    try:
        instance = parse(data, where, overrides)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as failure:
        raise error("FXP206", where=where, why=str(failure), fix=_FIX) from None
    except FxpartError as fault:
        raise FxpartError(fault.problems[:20]) from None
    check_instance(instance, where)
    return instance
