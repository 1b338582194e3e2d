"""One microbatch on one stage: forward, backward, and the tensors alive between them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fxpart.collectives.gather_prefetch import BackwardGathers
from fxpart.program.edges import ValueEdge
from fxpart.runtime.executor.split_backward import BackwardSplitter, WeightBackward
from fxpart.runtime.executor.stage_signature import StageSignature

Root = torch.Tensor | GradientEdge


class StageMicrobatch:
    """The tensors of one microbatch on one stage.

    inputs: as received; leaves of autograd if their gradient is sent back. outputs: of the stage
    module. relayed: inputs as used by this stage, at which gradients of later users of the same
    value enter. gradients: by input position, after :meth:`backward`. outlives_backward: whether a
    stage of this rank reads outputs after the backward, as a stage that returns no gradient may.
    """

    __slots__ = (
        "_edges",
        "_gathers",
        "gradients",
        "inputs",
        "outlives_backward",
        "outputs",
        "relayed",
        "table",
    )

    def __init__(self, table: StageSignature) -> None:
        """table: the signature of the stage."""
        self.table = table
        self.inputs: list[Any] = [None] * table.arity
        self.outputs: tuple[torch.Tensor, ...] = ()
        self.relayed: dict[int, torch.Tensor] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.outlives_backward = False
        self._edges: tuple[GradientEdge | None, ...] | None = None
        self._gathers: BackwardGathers | None = None

    def forward(self, key: int, *, train: bool, step: object = None) -> None:
        """Run the stage module on ``inputs``. step: what the microbatches of a step share."""
        table = self.table
        table.step_state.begin_microbatch(step)
        with torch.set_grad_enabled(train):
            used = self.inputs
            if train:
                for position in table.gradient_inputs:
                    leaf = used[position].requires_grad_()
                    # An accumulated gradient would get the strides of the leaf.
                    leaf.register_hook(partial(self.gradients.__setitem__, position))
                if table.relayed:
                    used = list(used)
                    for position in table.relayed:
                        used[position] = self.relayed[position] = used[position].view_as(
                            used[position]
                        )
            self.outputs = table.keeping.call(table.module, key, used, train=train)
            self._gathers = table.keeping.take_gathers()

    def value(self, link: ValueEdge, *, forward: bool) -> torch.Tensor:
        """Return the tensor that a link carries: an output, or the gradient of an input."""
        return self.outputs[link.output] if forward else self.gradients[link.input]

    def drop_outputs(self) -> None:
        """Drop the outputs, which are not read again; keep their edges in the graph."""
        loss = self.table.loss
        self._edges = tuple(
            get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in self.outputs
        )
        self.outputs = tuple(
            tensor if position == loss else tensor.new_empty(0)
            for position, tensor in enumerate(self.outputs)
        )

    def root(self, position: int) -> Root | None:
        """Return where the gradient of an output enters the backward; None if it needs none."""
        if self._edges is not None:
            return self._edges[position]
        output = self.outputs[position]
        return output if output.requires_grad else None

    def backward(self, roots: BackwardRoots) -> None:
        """Add to the parameters' gradients, and store those of the inputs (zeros if none)."""
        tensors, gradients = roots.of(self)
        if tensors:
            with self.table.keeping.reduce_meanwhile(self.table.module):
                torch.autograd.backward(tensors, gradients)  # type: ignore[arg-type]
        self._end()

    def backward_inputs(
        self, roots: BackwardRoots, halves: BackwardSplitter
    ) -> WeightBackward | None:
        """Compute the inputs' gradients; return the second half for those of the parameters."""
        tensors, gradients = roots.of(self)
        leaves = [self.inputs[position] for position in self.table.gradient_inputs]
        rest = halves.first(tensors, gradients, leaves)
        self._end()
        return rest

    def _end(self) -> None:
        if self._gathers is not None:
            self._gathers.close()
            self._gathers = None
        for position in self.table.gradient_inputs:
            leaf = self.inputs[position]
            if leaf.grad is None:
                self.gradients[position] = torch.zeros_like(leaf)
            elif position not in self.gradients:  # It was set, not accumulated.
                self.gradients[position] = leaf.grad
        if self.table.keeping.offload is not None:
            self.table.keeping.offload.release()
        kept = tuple(tensor.detach() for tensor in self.outputs) if self.outlives_backward else ()
        self.inputs, self.outputs, self.relayed, self._edges = [], kept, {}, None


class BackwardRoots:
    """The gradients that a backward starts from, summed in the order in which they are added.

    They are added by descending consumer, which is the order of autograd in a single process.
    """

    __slots__ = ("_entering", "_outputs", "_shared", "_table")

    def __init__(self, table: StageSignature) -> None:
        """table: the signature of the stage."""
        self._table = table
        self._outputs: dict[int, torch.Tensor] = {}
        self._entering: dict[int, torch.Tensor] = {}
        self._shared: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_shared(self, sums: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add tied parameters with the gradients that later stages have summed."""
        self._shared += sums

    def add(self, link: ValueEdge, gradient: torch.Tensor) -> None:
        """Add a gradient received over a link: of an output, or of an input with other users."""
        if link.source == self._table.index:
            _add(self._outputs, link.output, gradient)
        else:
            _add(self._entering, self._table.positions[link.name], gradient)

    def add_loss(self, loss: torch.Tensor, weight: float) -> None:
        """Add the loss, weighted by its microbatch's share of the batch."""
        assert self._table.loss is not None
        _add(self._outputs, self._table.loss, torch.full_like(loss, weight))

    def of(self, cell: StageMicrobatch) -> tuple[list[Root], list[torch.Tensor]]:
        """Return tensors (or graph edges) and gradients for torch.autograd.backward."""
        found: list[tuple[Root | None, torch.Tensor]] = [*self._shared]
        found += [(cell.relayed[p], g) for p, g in self._entering.items()]
        found += [(cell.root(p), g) for p, g in self._outputs.items()]
        kept = [(root, gradient) for root, gradient in found if root is not None]
        return [root for root, _ in kept], [gradient for _, gradient in kept]


def _add(into: dict[int, torch.Tensor], key: int, value: torch.Tensor) -> None:
    into[key] = into[key] + value if key in into else value
