"""Current tensors of a captured model in its modules."""

from __future__ import annotations

import torch

from fxpart.capture.captured_model import CapturedModel
from fxpart.capture.fake_tensors import as_meta
from fxpart.compat import replaced_names
from fxpart.errors import FxpartError, Problem


def refresh_state(captured: CapturedModel) -> None:
    """Update the state to the modules' current tensors, which may have been replaced.

    Raise FXP113 for a missing tensor, or one of another shape or dtype.
    """
    problems: list[Problem] = []
    names = replaced_names(captured.aliases)
    for name, (place, key) in captured.slots.items():
        known, now = captured.state[name], place.get(key)
        if now is known:
            continue
        if not isinstance(now, torch.Tensor) or (now.shape, now.dtype) != (
            known.shape,
            known.dtype,
        ):
            what = f"{now.dtype} {list(now.shape)}" if isinstance(now, torch.Tensor) else str(now)
            problems.append(
                Problem(
                    "FXP113",
                    f"the module's {names.get(name, name)}",
                    f"it was {known.dtype} {list(known.shape)} when the model was compiled, but is "
                    f"{what} now",
                    "compile again after changing the module",
                )
            )
        else:
            captured.state[name] = as_meta(now)
    if problems:
        raise FxpartError(problems)


def live_parameters(captured: CapturedModel) -> dict[str, torch.Tensor]:
    """Return the parameters that the modules have now, by main name."""
    known = (name for name in captured.parameters if name in captured.slots)
    return {name: captured.slots[name][0][captured.slots[name][1]] for name in known}
