"""What a run of ``fxpart profile`` did."""

from __future__ import annotations

import msgspec

from fxpart.profile import Calibration, Crowding


class Profiled(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of ``fxpart profile`` did.

    seconds: of measuring and planning; capture_seconds: before that. ops, stages: measured now;
    known_ops, known_stages: found in the profile. calibration, crowding: of this model here, None
    where there was no time for them. median_error, worst_error: of stages predicted from ops with
    these factors, relative. plan: the best of one rank a stage, in words; step_seconds: what it
    is predicted to take. left_out: in words, what the budget did not reach.
    """

    path: str
    model: str
    device: str
    seconds: float
    capture_seconds: float = 0.0
    ops: int = 0
    known_ops: int = 0
    stages: int = 0
    known_stages: int = 0
    calibration: Calibration | None = None
    crowding: Crowding | None = None
    median_error: float = 0.0
    worst_error: float = 0.0
    plan: str = ""
    step_seconds: float = 0.0
    left_out: tuple[str, ...] = ()
