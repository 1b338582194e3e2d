"""What a user says about devices where the file does not."""

from __future__ import annotations

from dataclasses import dataclass

from fxpart.errors import FxpartError, error


@dataclass(frozen=True)
class Given:
    """None: take what the file says.

    accelerators, cpus: how many. memory: bytes of an accelerator. bandwidth: bytes a second between
    an accelerator and everything else.
    """

    accelerators: int | None = None
    cpus: int | None = None
    memory: float | None = None
    bandwidth: float | None = None


def missing(where: str, option: str, what: str) -> FxpartError:
    """An error for what this format leaves out and was not given."""
    return error("FXP109", where=where, why=f"the file does not say {what}", fix=f"give {option}")


def useless(where: str, option: str, why: str) -> FxpartError:
    """An error for what was given and has no use in this format."""
    return error("FXP109", where=f"{option} for {where}", why=why, fix=f"leave {option} out")
