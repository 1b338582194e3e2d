"""State of a run beside the trainer's own, captured into and restored from a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from fxpart.checkpoint.manifest import FINITE
from fxpart.checkpoint.value_codec import from_json_value, to_json_value
from fxpart.errors import error
from fxpart.runtime.transport.agreement import agree, convert_transport_errors, digest

if TYPE_CHECKING:
    from fxpart.runtime.fit import FitLoop

# position and random state of each process, and the index of each process's state
_OWN, _OF = "data", "data_of"
LEDGER = "ledger"  # digest of the run's history in its ledger
REQUEST = "request"  # what the user requested, see run_request
_OF_SESSION = (LEDGER, REQUEST, FINITE)


def capture_run_state(fit: FitLoop) -> dict[str, Any]:
    """Return the state as JSON values; every rank calls it, with nothing in flight.

    FXP109 on every rank if a user object has a state that is not plain. Data position and random
    states belong to each process; equal ones are stored once.
    """
    transport = fit.transport

    def make() -> tuple[tuple[dict[str, Any], bytes], str]:
        own = msgspec.json.encode(_plain(fit.position.state(), "the data's position"))
        return (_of_fit(fit), own), f"step {fit.step} epoch {fit.position.epoch}"

    found, mine = agree(transport, "the state of the run", make)
    with convert_transport_errors(transport, "sharing the position in the data"):
        rows = transport.exchange([digest(mine.decode())])
        all_equal = all(row == rows[0] for row in rows)
        raws = [mine] * len(rows) if all_equal else transport.exchange_bytes(mine)
    kinds = list(dict.fromkeys(raws))
    found[_OWN] = [msgspec.json.decode(raw) for raw in kinds]
    found[_OF] = [kinds.index(raw) for raw in raws]
    return found


def restore_run_state(
    fit: FitLoop, found: Mapping[str, Any], *, position: bool = True
) -> tuple[None, str]:
    """Restore the state, and describe it; a process that is new takes the position of rank 0.

    position: also that in the data.

    FXP512 for a checkpoint that no run has saved: it has no data position.
    """
    if _OF not in found or _OWN not in found:
        raise error(
            "FXP512",
            where="the newest checkpoint of the run's folder",
            why="it was not saved by fit, so it has no data position",
            fix="use trainer.load_checkpoint with it, then fit with a new folder",
        )
    plain = {
        key: from_json_value(value)
        for key, value in found.items()
        if key not in (_OWN, _OF, *_OF_SESSION)
    }
    fit.step, fit.loss, fit.values = plain["step"], plain["loss"], plain["values"]
    _load(fit.scheduler, plain["scheduler"])
    _restore_callbacks(fit, plain)
    if position:
        transport, of = fit.transport, found[_OF]
        processes = 1 if len(transport.local) == transport.ranks else transport.ranks
        mine = transport.local[0] if len(of) == processes else 0
        fit.position.load(from_json_value(found[_OWN][of[mine]]))
    return None, f"step {fit.step} epoch {fit.position.epoch}"


def _restore_callbacks(fit: FitLoop, plain: Mapping[str, Any]) -> None:
    """Restore callbacks, in the order of those of each class, and early stopping.

    Warn of saved states that nothing takes.
    """
    left, stopping = list(plain["callbacks"]), plain["early stopping"]
    _load(fit.run.early_stopping, stopping)
    for callback in fit.run.callbacks:
        names = [name for name, _ in left]
        if (name := type(callback).__name__) in names:
            _load(callback, left.pop(names.index(name))[1])
    lost = [name for name, state in left if state is not None]
    if stopping is not None and fit.run.early_stopping is None:
        lost.append("early stopping")
    if lost and 0 in fit.transport.local:
        warnings.warn(
            f"the run continues after step {fit.step} without the saved state of "
            f"{', '.join(lost)}, which is not given",
            stacklevel=7,
        )


def _of_fit(fit: FitLoop) -> dict[str, Any]:
    """Return the part that is equal on every rank."""
    callbacks = fit.run.callbacks
    return {
        "step": fit.step,
        "loss": to_json_value(fit.loss),
        "values": to_json_value(dict(fit.values)),
        "scheduler": _state(fit.scheduler, "the scheduler"),
        "early stopping": _state(fit.run.early_stopping, "early stopping"),
        "callbacks": [
            [type(each).__name__, _state(each, f"callback {type(each).__name__}")]
            for each in callbacks
        ],
    }


def _state(thing: Any, what: str) -> Any:
    """Return the state_dict of an object without functions, or None."""
    if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
        return None
    state = thing.state_dict()
    if isinstance(state, Mapping):
        state = {key: value for key, value in state.items() if not callable(value)}
    return _plain(state, what)


def _load(thing: Any, state: Any) -> None:
    if state is not None and hasattr(thing, "load_state_dict"):
        thing.load_state_dict(state)


def _plain(value: Any, what: str) -> Any:
    try:
        return to_json_value(value, what)
    except TypeError as cause:
        raise error(
            "FXP109", where=f"a checkpoint of {what}", why=str(cause),
            fix="use numbers, strings, bytes, lists and dicts in its state_dict",
        ) from cause  # fmt: skip
