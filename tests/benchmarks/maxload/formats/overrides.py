"""What a user specifies about devices in place of what the file contains."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.errors import FxpartError, error


@dataclass(frozen=True)
class DeviceOverrides:
    """Values that replace those of the file. None: take what the file contains.

    accelerators, cpus: how many. memory: bytes of an accelerator. bandwidth: bytes per second
    between an accelerator and everything else.
    """

    accelerators: int | None = None
    cpus: int | None = None
    memory: float | None = None
    bandwidth: float | None = None


def missing(where: str, option: str, what: str) -> FxpartError:
    """Return an error for a required value that neither the file nor an option specifies."""
    return error("FXP109", where=where, why=f"the file does not say {what}", fix=f"give {option}")


def useless(where: str, option: str, why: str) -> FxpartError:
    """Return an error for an option that has no use in this format."""
    return error("FXP109", where=f"{option} for {where}", why=why, fix=f"leave {option} out")
