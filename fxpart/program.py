"""What a rank runs, as data: stages, their values and state. Torch-free; travels as JSON.

The code generator writes these beside the stage modules (``manifest.json``); the runtime needs
nothing else of the compiler.
"""

from __future__ import annotations

import msgspec

Dim = int | str  # a number, or an expression in the program's symbols such as "s0*s1"


class ValueSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tensor that crosses a boundary: its name, dtype ("float32"), and shape.

    requires_grad: whether a gradient for it flows back.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    requires_grad: bool = False


class InputSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tensor of the user's batch.

    name: the graph's placeholder. path: where it lies in the batch object, e.g. ("input_ids",),
    (0,) or (2, "mask"). batch_dim: the dim along which microbatches are cut, None to pass it whole.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[Dim, ...]
    batch_dim: int | None = None


class ConstantSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A leaf of the batch that is no tensor (None, bool, int, float, str): fixed at capture."""

    path: tuple[str | int, ...]
    value: None | bool | int | float | str


class StateSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A parameter, buffer or lifted constant of a stage.

    attribute: the escaped Python name in the stage module. name: the original qualified name.
    kind: "parameter", "buffer" or "constant". owner: the one stage that owns it; a stage that is
    not the owner holds a bit-equal copy (a tie).
    """

    attribute: str
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    requires_grad: bool = False
    persistent: bool = True
    owner: int = 0


class StageSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage: the call signature of its module.

    ``Stage<index>.forward(key, *inputs)`` returns a tuple, one tensor for each output. key: an int
    that seeds the stage's random ops. inputs: user inputs and values of earlier stages by name.
    sources: per input, the producing stage, or -1 for a user input. outputs: values used by later
    stages, the loss and the user's outputs. targets: per output, the stages that receive it.
    """

    index: int
    inputs: tuple[ValueSpec, ...]
    sources: tuple[int, ...]
    outputs: tuple[ValueSpec, ...]
    targets: tuple[tuple[int, ...], ...]
    state: tuple[StateSpec, ...]
    random_ops: int = 0


class ProgramSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole program, the same on every rank.

    symbols: per symbol the user input and dim it is read from, {"s0": ("input_ids", 0)}.
    loss: the value that holds the loss (a scalar), and outputs: the user's output values in order.
    ties: groups of stages that hold one parameter, by its original name (owner first).
    """

    inputs: tuple[InputSpec, ...]
    constants: tuple[ConstantSpec, ...]
    symbols: dict[str, tuple[str, int]]
    stages: tuple[StageSpec, ...]
    loss: str
    outputs: tuple[str, ...]
    ties: dict[str, tuple[int, ...]]
    aliases: dict[str, str] = {}  # other original names of one storage -> its main name
    seed: int = 0
