"""Announced batches: the rows of their lookups are requested while the batch before them runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from fxpart.collectives.row_prefetch import RowPrefetch
from fxpart.errors import error
from fxpart.runtime.batch.batch_reader import LocalBatch, MicrobatchSplit
from fxpart.runtime.mesh.mesh_ranks import MeshRank
from fxpart.runtime.transport.agreement import convert_transport_errors

if TYPE_CHECKING:
    from fxpart.collectives.all_to_all_embedding import RowRequest
    from fxpart.runtime.embedding_tables.managed_tables import ManagedTables
    from fxpart.runtime.trainer_parts import TrainerParts

_FIX = "pass the announced batch, or announce the batch that is passed"


class RowLookahead:
    """The announced batches of a trainer, and the prefetched rows of its communicators.

    It does nothing if no lookup of this process can be prefetched: for tables sharded over batch
    axes, by ids that follow from the inputs, in stages that are neither compiled nor CUDA graphs.
    """

    def __init__(self, parts: TrainerParts, managed: ManagedTables) -> None:
        """parts: of a trainer that is flushed after each batch. managed: its managed ids."""
        self._parts, self._managed = parts, managed
        self._prefetches: dict[int, dict[int, RowPrefetch]] = {}  # By mesh rank and stage.
        self._announced: tuple[Any, bool] | None = None
        # As it was passed, and with rows in place of managed ids.
        self._next: tuple[LocalBatch, LocalBatch] | None = None
        self._expected: tuple[LocalBatch, LocalBatch] | None = None
        self._versions: Mapping[str, int] = {}
        options, made = parts.options, dict[int, RowPrefetch]()
        if parts.meshes is None or parts.compiler is not None or options.cuda_graphs:
            return
        for mesh_rank in parts.mesh_ranks:
            for stage, module in mesh_rank.modules.items():
                mesh = parts.meshes.of(stage, mesh_rank.index)
                if hasattr(module, "lookups"):
                    found = made.setdefault(id(mesh), RowPrefetch(mesh))
                    self._prefetches.setdefault(mesh_rank.index, {})[stage] = found

    def announce(self, batch: Any, *, local: bool) -> None:
        """Note the batch behind the next one."""
        self._announced = batch, local

    def check(self, seen: LocalBatch, found: LocalBatch) -> None:
        """Raise FXP105 if a batch is not the announced one. found: with rows for managed ids.

        The rows that were requested are dropped if ids have other rows, as an update came between.
        """
        if self._expected is None:
            return
        for name, tensor in self._expected[0].tensors.items():
            given = seen.tensors.get(name)
            same = given is not None and (given is tensor or _is_equal(given, tensor))
            if not same or tensor._version != self._versions[name]:
                raise error(
                    "FXP105", where=f"input {name}",
                    why="trainer.prefetch() has announced another batch for this step", fix=_FIX,
                )  # fmt: skip
        rows = self._expected[1].tensors
        if found is not seen and not all(_is_equal(rows[n], t) for n, t in found.tensors.items()):
            announced = self._announced
            self.reset()
            self._announced = announced

    def look(self, step: int) -> str:
        """Read the announced batch; return what must be equal on all ranks, as text.

        step: number of its update.
        """
        given, self._announced, self._next = self._announced, None, None
        if given is None:
            return ""
        self._next = self._read(*given, step)
        return " and the rows of an announced batch"

    @contextmanager
    def serve(self, cuts: Sequence[MicrobatchSplit]) -> Iterator[None]:
        """Serve the lookups of a step in the context, and request those of the announced batch.

        cuts: the step's batch, by mesh rank.
        """
        if self._next is None and self._expected is None:
            yield
            return
        known = self._expected is not None
        self._expected, self._next = self._next, None
        if self._expected is not None:
            self._versions = {n: t._version for n, t in self._expected[0].tensors.items()}
        if not self._prefetches:
            yield
            return
        for mesh_rank, cut in zip(self._parts.mesh_ranks, cuts, strict=True):
            requests = {} if known else self._list_requests(mesh_rank, cut)
            for prefetch in self._of(mesh_rank):
                prefetch.begin(requests.get(id(prefetch), ()))
        try:
            yield
            self._communicate()
        except BaseException:
            if not self._parts.local.has_threads and self._parts.local.broken is None:
                self._communicate()
                self.reset()
            self._clear()
            raise

    def reset(self) -> None:
        """Forget announced batches, between two steps."""
        if self._expected is not None:
            for mesh_rank in self._parts.mesh_ranks:
                for prefetch in self._of(mesh_rank):
                    prefetch.finish()
        self._clear()

    # -- internals --------------------------------------------------------------------------------

    def _of(self, mesh_rank: MeshRank) -> list[RowPrefetch]:
        found = self._prefetches.get(mesh_rank.index, {})
        return list({id(prefetch): prefetch for prefetch in found.values()}.values())

    def _read(self, batch: Any, local: bool, step: int) -> tuple[LocalBatch, LocalBatch]:
        source, alone = self._parts.source, self._parts.is_alone
        seen = source.feed.look(batch, local=local)
        found = self._managed.assign(seen, step, ahead=True)
        if not self._prefetches:
            return seen, found
        if seen.absent and not alone:
            raise error(
                "FXP109", where=f"trainer.prefetch() without the input {seen.absent[0]}",
                why="only complete batches can be read before the ranks compare them",
                fix="pass all inputs on every rank",
            )  # fmt: skip
        cuts = source.feed.parts(source.feed.cut(found, source.microbatches))
        for mesh_rank, cut in zip(self._parts.mesh_ranks, cuts, strict=True):
            requests = self._list_requests(mesh_rank, cut)
            for prefetch in self._of(mesh_rank):
                try:
                    prefetch.prepare(requests.get(id(prefetch), ()))
                except IndexError as cause:
                    raise error(
                        "FXP105", where="the announced batch", why=str(cause),
                        fix="pass ids of rows of the table",
                    ) from cause  # fmt: skip
        return seen, found

    def _list_requests(
        self, mesh_rank: MeshRank, cut: MicrobatchSplit
    ) -> dict[int, list[list[RowRequest]]]:
        """Return the lookups of a mesh rank by prefetch, stage and microbatch."""
        found: dict[int, list[list[RowRequest]]] = {}
        for stage, prefetch in self._prefetches.get(mesh_rank.index, {}).items():
            assert self._parts.meshes is not None, "lookups are of a mesh"
            spec, module = mesh_rank.spec.stages[stage], mesh_rank.modules[stage]
            device = self._parts.devices[self._parts.ranks[stage][mesh_rank.index]]
            mesh = self._parts.meshes.of(stage, mesh_rank.index)
            names = [value.name for value in spec.inputs]
            for inputs in cut.taken(names, device):
                mesh.requests = []
                try:
                    with torch.no_grad():
                        module.lookups(*map(inputs.get, names))  # type: ignore[operator]
                    found.setdefault(id(prefetch), []).append(mesh.requests)
                finally:
                    mesh.requests = None
        return found

    def _communicate(self) -> None:
        """Request all rows ahead, on all mesh ranks of this process."""

        def end(mesh_rank: MeshRank) -> None:
            for prefetch in self._of(mesh_rank):
                prefetch.end()

        with convert_transport_errors(self._parts.transport, "requesting rows"):
            self._parts.run_on_mesh_ranks(end)

    def _clear(self) -> None:
        for mesh_rank in self._parts.mesh_ranks:
            for prefetch in self._of(mesh_rank):
                prefetch.clear()
        self._announced = self._next = self._expected = None


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
