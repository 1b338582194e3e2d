"""The result of capture, the input of all later stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fxpart.capture.flat_batch import look_up
from fxpart.capture.model_tensors import Slots
from fxpart.program.spec import ConstantSpec, InputSpec


@dataclass(frozen=True)
class CapturedModel:
    """A captured model.

    graph: a GraphModule whose placeholders are the tensor inputs in the order of ``inputs``, whose
    ``get_attr`` targets are original qualified names, and whose output is ``(loss, *outputs)`` (the
    loss is None without a loss). Each node has ``meta["val"]`` (fake tensors, symbolic if the batch
    is) and a :class:`~fxpart.compiler.NodeAnnotation` with module path and source. method:
    "export", "export-strict" or "symbolic-trace". symbolic: whether the batch is a symbol. symbols:
    per symbol name, the input and dim it is read from. aliases: other names of a storage -> its
    main name. state: main name -> live tensor (meta tensors for models that are not allocated):
    parameters, buffers and lifted constants. persistent: names of buffers saved with the model.
    loss_kind: "given", "output" or "mean-square" (only for verification and prediction).
    microbatch_size: the only size that the graph takes, None for a symbolic batch. output_dims: per
    output, the dim that grows with the batch, None if there is none or it is unknown. form: puts
    outputs by name into the structure that the model returns. precision: "bf16" for autocast.
    tried: descriptions of the methods that failed before. again: captures the same model in
    training or evaluation mode, optionally at another microbatch size. eager: runs the user's
    module and loss on a batch object and returns ``(loss, *outputs)``, for comparison. example:
    creates the example inputs as one global batch of ``batch_size`` rows. config: a transformers
    model's config.json. slots: where the user's modules store each tensor of ``state``.
    mode_change: describes the module that has changed between training and evaluation mode, "" if
    none. default_dtype: torch's default at capture. source: the user's module and loss. guard:
    raises FXP113 if a value that the graph treats as a constant changed or a gradient hook was
    added; it calls the given function for tensors written in place, and returns how often tensors
    were copied. guarded: names of the state that the guard watches.
    """

    graph: fx.GraphModule
    inputs: tuple[InputSpec, ...]
    constants: tuple[ConstantSpec, ...]
    outputs: tuple[str, ...]
    symbols: dict[str, tuple[str, int]]
    hints: dict[str, int]
    state: dict[str, torch.Tensor]
    parameters: tuple[str, ...]
    persistent: frozenset[str]
    aliases: dict[str, str]
    method: str
    symbolic: bool
    batch_size: int
    loss_kind: str
    model_name: str
    training: bool = True
    precision: str = "fp32"
    microbatch_size: int | None = None
    output_dims: tuple[int | None, ...] = ()
    form: Callable[[Mapping[str, Any]], Any] | None = field(default=None, repr=False)
    tried: tuple[str, ...] = ()
    seconds: float = 0.0
    again: Callable[..., CapturedModel] | None = field(default=None, repr=False)
    eager: Callable[[Any], tuple[torch.Tensor, ...]] | None = field(default=None, repr=False)
    example: Callable[[], Any] | None = field(default=None, repr=False)
    config: str = field(default="", repr=False)
    slots: Slots = field(default_factory=dict, repr=False)
    mode_change: Callable[[], str] | None = field(default=None, repr=False)
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    source: tuple[Any, Any] | None = field(default=None, repr=False)
    guard: Callable[[Any], int] | None = field(default=None, repr=False)
    guarded: frozenset[str] = frozenset()

    def read(self, batch: Any) -> tuple[torch.Tensor, ...]:
        """Return the graph's arguments from a batch object, in the order of ``inputs``."""
        return tuple(look_up(batch, spec.path) for spec in self.inputs)
