"""The result of capture, on which everything later is built."""

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
    ``get_attr`` targets are original qualified names, and whose output is ``(loss, *outputs)``
    (the loss is None where there is none). Each node has ``meta["val"]`` (fake tensors, symbolic
    where the batch is) and an :class:`~fxpart.compiler.Annotation` with module path and source.
    method: "export", "export-strict" or "symbolic-trace". symbolic: whether batch is a symbol.
    symbols: per symbol name the input and dim it is read from. aliases: other names of one storage
    -> the main name. state: main name -> live tensor (meta tensors for models not allocated);
    parameters, buffers and lifted constants. persistent: names of buffers saved with the model.
    loss_kind: "given", "output" or "mean-square" (the fallback for verify and prediction only).
    microbatch_size: the only size the graph takes, None where the batch is symbolic. output_dims:
    per output the dim that grows with the batch, None where none does or it is not known. form:
    puts outputs by name into the structure that the model returns.
    precision: "bf16" where it runs under autocast.
    tried: what was tried before the method that worked, as text. again: captures the same model
    with training switched on or off, for evaluation, and at another microbatch size if one is
    given. eager: runs the user's own module and loss on a batch object and returns ``(loss,
    *outputs)``, for comparison. example: makes the example inputs as one global batch of
    ``batch_size`` rows. config: a transformers model's config.json.
    slots: where the user's modules store each tensor of ``state``.
    mode_change: says which module has changed between training and evaluation mode since, ""
    if none has. default_dtype: torch's, when the model was captured.
    source: the user's module and loss. guard: raises FXP113 once a value that the graph has as a
    constant is another, or a gradient hook was added; given a function that copies tensors anew, it
    calls that for tensors that were written in place. Returns how often tensors were copied.
    guarded: names of the state that the guard watches.
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
        """The graph's arguments out of a batch object, in the order of ``inputs``."""
        return tuple(look_up(batch, spec.path) for spec in self.inputs)
