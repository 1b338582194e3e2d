"""Optimizer shards (ZeRO): the part of each parameter that a rank's optimizer owns.

ZeRO-1 and -2 (Rajbhandari et al., SC 2020): mesh ranks with equal copies of a parameter share its
optimizer state. Each mesh rank along ``zero_axis`` updates one shard and sends it to the others.
The shards are equal ranges of the flat parameter: each mesh rank owns 1/n of every tensor, to the
element, whatever its shape. A shard is a view and costs no memory. The optimizer is created with
the parameters themselves, so groups that depend on shapes are correct.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from fxpart.program.spec import has_backward, select_zero_axes
from fxpart.runtime.embedding_tables import (
    SparseGradientParts,
    SparseGradients,
    make_sparse_target,
)
from fxpart.runtime.executor.instruction import BackwardHooks
from fxpart.runtime.gradients.buckets import PartialGradient, make_buckets
from fxpart.runtime.gradients.reduce_scatter import (
    GradientReduceScatter,
    all_gather,
    all_reduce,
    get_dense_gradient,
)
from fxpart.runtime.gradients.reducer import ReductionQueue, StageGradientReducer
from fxpart.runtime.mesh.communicators import MeshCommunicators
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.optimizer.host_parameters import HostParameters
from fxpart.runtime.state.model_state import ModelState, StateEntry, shard_along_axis
from fxpart.runtime.state.shard_layout import ShardLayout
from fxpart.sharding.mesh import parse_axes


class OptimizerShards:
    """The optimizer's tensors of this process, and the gradient reductions into them.

    Methods with a mesh rank are called by all mesh ranks at once. host: the copies that the
    optimizers update in host memory instead; None without offloading.
    """

    host: HostParameters | None = None

    def __init__(
        self, state: ModelState, meshes: MeshCommunicators | None, *, shared_rows: bool = True
    ) -> None:
        """meshes: None if the program is not sharded. shared_rows: whether sparse gradients of
        embedding tables that several stages share stay sparse.
        """
        self._state = state
        self._meshes = meshes
        sharding = state.mesh_ranks[0].spec.sharding
        self.zero = 0 if sharding is None or meshes is None else sharding.zero
        self._zero_axis = sharding.zero_axis if sharding is not None and self.zero else ""
        self._replicas = bool(state.mesh_ranks[0].spec.replicas)
        self._shards: dict[int, nn.Parameter] = {}
        for name, entry in state.entries.items():
            if self.axis(name):
                for (_, at), copy in entry.copies.items():
                    self._shards.setdefault(id(copy), _make_shard(entry, at, self.axis(name), copy))
        self.rows = SparseGradients(state, meshes, shared=shared_rows)
        self._scatters: dict[tuple[int, int], dict[str, GradientReduceScatter]] = {}
        if meshes is not None and self._shards:
            for mesh_rank in state.mesh_ranks:
                for stage in mesh_rank.modules:
                    mesh = meshes.of(stage, mesh_rank.index)
                    self._scatters[stage, mesh_rank.index] = {
                        axes: GradientReduceScatter(mesh, parse_axes(axes))
                        for axes in dict.fromkeys(filter(None, map(self.axis, state.entries)))
                    }
        self._reducers = self._make_reducers()
        self.closing = False  # An update follows the current step, so its reductions may start.
        if self.zero == 2:
            self._send_early()

    def axis(self, name: str) -> str:
        """Return the mesh axes along which a parameter is sharded for the optimizer, or "".

        A scalar without dims is not sharded: every mesh rank updates it.
        """
        entry = self._state.entries[name]
        if not entry.trainable or not entry.pieces.shape:
            return ""
        return ",".join(select_zero_axes(self._zero_axis, entry.pieces.axes, entry.partial))

    def pieces(self, name: str) -> ShardLayout:
        """Return how the parameter is sharded over the optimizers of the mesh ranks."""
        return shard_along_axis(self._state.entries[name].pieces, self.axis(name))

    def of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the optimizer's tensor for a parameter, on the rank's device."""
        return self._shards.get(id(parameter), parameter)

    def updated(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that an optimizer has for a parameter, and has state for."""
        found = self.of(parameter)
        return found if self.host is None else self.host.of(found)

    def accumulating(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that has a parameter's gradient before :meth:`finish`."""
        return self.of(parameter) if self.zero == 2 else parameter

    def cut(self) -> list[str]:
        """Return parameters of which an optimizer of this process owns only a part."""
        return [
            name
            for name, entry in self._state.entries.items()
            if entry.trainable and entry.copies and len(self.pieces(name).sources) > 1
        ]

    def install(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the optimizer's parameters by their shards, and slice existing state."""
        if not self._shards:
            return
        for group in optimizer.param_groups:
            group["params"] = [self._replace_parameter(optimizer, p) for p in group["params"]]

    def _replace_parameter(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor
    ) -> torch.Tensor:
        shard = self.of(parameter)
        if shard is not parameter and parameter in optimizer.state:
            start = (shard.data_ptr() - parameter.data_ptr()) // parameter.itemsize
            shape = parameter.shape
            optimizer.state[shard] = {
                key: value.reshape(-1)[start : start + shard.numel()].clone()
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == shape
                else value
                for key, value in optimizer.state.pop(parameter).items()
            }
        return shard

    def move_to_host(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        """Let installed optimizers update copies of their tensors in host memory."""
        pairs = [(p, self.of(p)) for _, p in self._state.parameters()]
        self.host = HostParameters.of_optimizers(optimizers, pairs)

    # -- gradients ------------------------------------------------------------------------------

    def hooks(self, mesh_rank: int) -> BackwardHooks | None:
        """Return the hooks around the backwards of a mesh rank's stages, None if there are none."""
        if self.zero != 2 and not self._reducers:
            return None
        return BackwardHooks(
            partial(self._last, mesh_rank),
            partial(self._after, mesh_rank),
            partial(self._skip, mesh_rank),
        )

    def _last(self, mesh_rank: int, stage: int) -> None:
        if self.closing and (stage, mesh_rank) in self._reducers:
            self._reducers[stage, mesh_rank].arm()

    def _after(self, mesh_rank: int, stage: int) -> None:
        if self.zero == 2:
            self.after_backward(mesh_rank, stage)
        reducer = self._reducers.get((stage, mesh_rank))
        if reducer is not None and reducer.armed:
            reducer.rest()

    def _skip(self, mesh_rank: int, stage: int) -> None:
        """After a failure, release mesh ranks in other processes; local ones are aborted
        separately.
        """
        assert self._meshes is not None
        if self.closing and (stage, mesh_rank) in self._reducers and not self._meshes.threads:
            self._reducers[stage, mesh_rank].skip()

    def conclude(self, mesh_rank: MeshRank) -> None:
        """After a failure that all ranks know of, complete and discard pending reductions."""
        if self._meshes is not None and self._meshes.threads:
            return
        for stage in sorted(mesh_rank.modules):
            if (stage, mesh_rank.index) in self._reducers:
                self._reducers[stage, mesh_rank.index].finish()

    def after_backward(self, mesh_rank: int, stage: int) -> None:
        """ZeRO-2: keep this mesh rank's shards of the gradients that a backward has computed.

        Most are sent during the backward; tied gradients are complete only now.
        """
        self._scatter(mesh_rank, stage, list(self._iterate_reduced(mesh_rank, stage)))

    def collect(self, mesh_rank: MeshRank) -> None:
        """ZeRO-2: the same for late tied gradients at the end of a step."""
        for stage in sorted(mesh_rank.modules):
            self.after_backward(mesh_rank.index, stage)

    def reset(self) -> None:
        """Clear all gradients."""
        for reducer in self._reducers.values():
            reducer.reset()
        if self._meshes is not None:
            self._meshes.forget()
        self.rows.reset()
        for scatters in self._scatters.values():
            for scatter in scatters.values():
                scatter.reset()
        for _, parameter in self._state.parameters():
            parameter.grad = self.of(parameter).grad = None

    def finish(self, mesh_rank: MeshRank) -> None:
        """Complete the reductions over mesh ranks of all gradients of owners and of replicas."""
        for stage in sorted(mesh_rank.modules):
            mine = list(self._iterate_reduced(mesh_rank.index, stage))
            done = self._finish_reducer(mesh_rank.index, stage)
            self._scatter(mesh_rank.index, stage, mine)
            self.rows.finish(mesh_rank, stage)
            summed: dict[str, tuple[tuple[str, ...], torch.Tensor]] = {}
            for name, entry, parameter in mine:
                shard, axes = self.of(parameter), self._get_partial_axes(name, entry)
                if name in self.rows:
                    continue
                if axes and shard.grad is not None and id(shard) not in done:
                    shard.grad = get_dense_gradient(shard)
                    summed[name] = axes, shard.grad
            if self._meshes is not None:
                all_reduce(self._meshes.of(stage, mesh_rank.index), summed.values())

    def share_rows(self) -> None:
        """Exchange sparse gradients between owners of a table, and keep those to update here."""
        self.rows.share()
        if self._shards:
            self.rows.shard(self._get_shard_range)

    def _get_shard_range(
        self, name: str, entry: StateEntry, mesh_rank: int, parameter: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[int, int]]:
        """Return the optimizer's tensor for a parameter, and its range of the flat parameter."""
        size = parameter.numel()
        shard = self.of(parameter)
        if shard is parameter:
            return shard, (0, size)
        return shard, shard_along_axis(entry.pieces, self.axis(name)).range(mesh_rank, size)

    def current(
        self,
        mesh_rank: MeshRank,
        *,
        summed: bool,
        rows: Mapping[tuple[str, int], SparseGradientParts | None],
    ) -> dict[str, torch.Tensor]:
        """Return copies of the owners' gradients as after :meth:`finish`, by name.

        summed: whether finish was called. rows: sparse gradients that several stages contribute to,
        by name and mesh rank. A gradient is sharded if the optimizer's tensor has it already;
        sparse gradients are returned dense.
        """
        found: dict[str, torch.Tensor] = {}
        for stage in sorted(mesh_rank.modules):
            mine: dict[str, tuple[tuple[str, ...], torch.Tensor]] = {}
            for name, entry, parameter in self._iterate_reduced(mesh_rank.index, stage):
                if entry.spec.owner != stage:
                    continue  # in the owner's sum
                shard = self.of(parameter)
                if shard.grad is not None and (name, mesh_rank.index) not in rows:
                    rest = () if summed else self._get_partial_axes(name, entry)
                    mine[name] = rest, get_dense_gradient(shard).clone()
                elif (parts := rows.get((name, mesh_rank.index))) is not None:
                    mine[name] = entry.partial, parts.gradient(parameter).to_dense()
                elif (parts := self.rows.pending(parameter)) is not None:
                    mine[name] = entry.partial, parts.gradient(parameter).to_dense()
                elif parameter.grad is not None:
                    mine[name] = entry.partial, get_dense_gradient(parameter).clone()
            if self._meshes is not None:
                all_reduce(self._meshes.of(stage, mesh_rank.index), mine.values())
            found |= {name: tensor for name, (_, tensor) in mine.items()}
        return found

    def spread(self, mesh_rank: MeshRank) -> None:
        """After the optimizer's step, all-gather the shards of every mesh rank."""
        if not self._shards or self._meshes is None:
            return
        for stage in sorted(mesh_rank.modules):
            mine: dict[str, list[torch.Tensor]] = {}
            for name, entry in self._state.entries.items():
                if (axes := self.axis(name)) and (stage, mesh_rank.index) in entry.copies:
                    mine.setdefault(axes, []).append(entry.copies[stage, mesh_rank.index])
            mesh = self._meshes.of(stage, mesh_rank.index)
            for axes, parameters in mine.items():
                pieces = [self.of(parameter).detach() for parameter in parameters]
                wholes = [parameter.data.view(-1) for parameter in parameters]
                all_gather(mesh, parse_axes(axes), pieces, wholes)

    def _finish_reducer(self, mesh_rank: int, stage: int) -> set[int]:
        """Wait for the stage's early reductions; return the ids of their parameters."""
        reducer = self._reducers.get((stage, mesh_rank))
        if reducer is None:
            return set()
        reducer.finish()
        return reducer.parameters

    def _make_reducers(self) -> dict[tuple[int, int], StageGradientReducer]:
        """Create by stage and mesh rank the reducers of gradients that no other stage contributes
        to.
        """
        found: dict[tuple[int, int], StageGradientReducer] = {}
        queues: dict[int, ReductionQueue] = {}
        for mesh_rank in self._state.mesh_ranks:
            for stage in sorted(mesh_rank.modules):
                terms = list(self._find_partial_gradients(mesh_rank, stage))
                if terms and self._meshes is not None:
                    queue = queues.setdefault(
                        self._state.rank(stage, mesh_rank.index), ReductionQueue()
                    )
                    mesh = self._meshes.sums(stage, mesh_rank.index)
                    found[stage, mesh_rank.index] = StageGradientReducer(
                        mesh, make_buckets(terms), queue
                    )
        return found

    def _find_partial_gradients(self, mesh_rank: MeshRank, stage: int) -> Iterator[PartialGradient]:
        """Yield the stage's own reductions in reverse order of use; equal on all mesh ranks."""
        spec = mesh_rank.spec.stages[stage]
        if self._meshes is None or not has_backward(mesh_rank.spec, spec):
            return
        for state in reversed(spec.state):
            entry = self._state.entries[state.name]
            mesh = self._meshes.mesh
            axes = tuple(a for a in entry.partial if mesh.shape[mesh.index(a)] > 1)
            if not (axes and entry.trainable and (self._replicas or len(entry.stages) == 1)):
                continue
            if state.name in self.rows:
                continue
            parameter = entry.copies[stage, mesh_rank.index]
            shard, cut = self.of(parameter), self.axis(state.name)
            # Under ZeRO-2 each backward sends its own; gradients equal along the axis are sliced at
            # the end.
            if not cut or (self.zero == 1 and {*parse_axes(cut)} <= {*axes}):
                yield PartialGradient(
                    parameter, shard, axes, cut, entry.pieces.most * parameter.itemsize
                )

    def _iterate_reduced(
        self, mesh_rank: int, stage: int
    ) -> Iterator[tuple[str, StateEntry, torch.Tensor]]:
        """Yield those whose gradients the stage reduces: that it owns, and with replicas all."""
        for name, entry in self._state.entries.items():
            mine = self._replicas or entry.spec.owner == stage
            if entry.trainable and mine and (stage, mesh_rank) in entry.copies:
                yield name, entry, entry.copies[stage, mesh_rank]

    def _get_partial_axes(self, name: str, entry: StateEntry) -> tuple[str, ...]:
        """Return the axes over which the gradient of the optimizer's tensor is still partial."""
        zero = parse_axes(self.axis(name))
        return tuple(axis for axis in entry.partial if axis not in zero)

    def _scatter(
        self, mesh_rank: int, stage: int, mine: list[tuple[str, StateEntry, torch.Tensor]]
    ) -> None:
        """Move gradients from parameters to the mesh rank's shards."""
        if self._meshes is None or not self._shards:
            return
        scatters = self._scatters[stage, mesh_rank]
        for scatter in scatters.values():
            scatter.finish()  # Complete those of a backward, whose gradients may exist only once.
        for name, entry, parameter in mine:
            shard = self.of(parameter)
            if parameter.grad is None or shard is parameter or name in self.rows:
                continue
            axes = self.axis(name)
            if {*parse_axes(axes)} <= {*entry.partial}:
                scatters[axes].add(parameter, shard)
            else:  # Equal on all mesh ranks of the axes: a slice is enough.
                line = get_dense_gradient(parameter).reshape(-1)
                pieces = shard_along_axis(entry.pieces, axes)
                piece = line[slice(*pieces.range(mesh_rank, len(line)))].clone()
                shard.grad = piece if shard.grad is None else shard.grad.add_(piece)
                parameter.grad = None
        for scatter in scatters.values():
            scatter.finish()

    def _send_early(self) -> None:
        """ZeRO-2: send a gradient as soon as a backward has computed it."""
        for name, entry in self._state.entries.items():
            axes = self.axis(name)
            if not axes or not {*parse_axes(axes)} <= {*entry.partial}:
                continue
            if name in self.rows or (len(entry.stages) > 1 and not self._replicas):
                continue
            for place, parameter in entry.copies.items():
                send = partial(self._scatters[place][axes].add, shard=self.of(parameter))
                parameter.register_post_accumulate_grad_hook(send)


def _make_shard(
    entry: StateEntry, mesh_rank: int, axis: str, parameter: torch.Tensor
) -> nn.Parameter:
    """Return a view of the mesh rank's shard; make the parameter contiguous first."""
    if not parameter.is_contiguous():
        parameter.data = parameter.data.contiguous()
    line = parameter.data.view(-1)
    shard = line[slice(*shard_along_axis(entry.pieces, axis).range(mesh_rank, len(line)))]
    return nn.Parameter(make_sparse_target(shard) if entry.spec.sparse else shard)
