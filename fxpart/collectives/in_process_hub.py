"""All mesh ranks of a stage in one process, one thread each, for tests and laptops."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxpart.collectives.communicator import Communicator, Size
from fxpart.collectives.failures import PeerLostError, TransferTimeoutError
from fxpart.errors import error
from fxpart.sharding import Mesh

T = TypeVar("T")
# (parts in rank order, the note of each rank) -> the result of each rank.
_Combine = Callable[[list[torch.Tensor], list[Any]], list[torch.Tensor]]


class _Rendezvous:
    """One collective of a group: the parts of each rank and, once complete, the results."""

    __slots__ = ("failed", "kinds", "notes", "parts", "results")

    def __init__(self) -> None:
        self.kinds: dict[int, tuple[Any, ...]] = {}
        self.parts: dict[int, torch.Tensor] = {}
        self.notes: dict[int, Any] = {}
        self.results: dict[int, torch.Tensor] | None = None
        self.failed: str | None = None


class _RendezvousHandle:
    """A rank's handle on a rendezvous."""

    __slots__ = ("_hub", "_meeting", "_mesh_rank", "_mesh_ranks")

    def __init__(
        self, hub: InProcessHub, mesh_rank: int, mesh_ranks: tuple[int, ...], meeting: _Rendezvous
    ) -> None:
        self._hub, self._meeting = hub, meeting
        self._mesh_rank, self._mesh_ranks = mesh_rank, mesh_ranks

    def wait(self) -> torch.Tensor:
        """Return the rank's result, once all ranks have arrived."""
        return self._hub.finish(self._mesh_rank, self._mesh_ranks, self._meeting)


class InProcessHub:
    """Rendezvous of the ranks of one mesh; ``hub.run(function)`` runs one thread per rank.

    If a rank fails or ends, the waits of the others raise PeerLostError, or TransferTimeoutError
    after ``timeout`` seconds. The last rank to arrive computes for all, in rank order, so that sums
    are equal on all ranks and in every run.
    """

    def __init__(self, mesh: Mesh, *, timeout: float = 300.0) -> None:
        """timeout: maximum seconds of a wait."""
        self.mesh = mesh
        self.timeout = timeout
        self.communicators = tuple(
            _InProcessCommunicator(self, mesh_rank) for mesh_rank in range(mesh.size)
        )
        self._changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        """Clear failures and rendezvous; no rank may be inside a collective."""
        with self._changed:
            self._gone: dict[int, str] = {}
            self._meetings: dict[tuple[tuple[int, ...], int], _Rendezvous] = {}
            self._turns: dict[tuple[tuple[int, ...], int], int] = {}

    def revive(self) -> None:
        """Readmit ranks that have ended; their earlier parts remain."""
        with self._changed:
            self._gone.clear()

    def abort(self, mesh_rank: int, cause: BaseException | str) -> None:
        """Remove a rank: all current and future waits for it fail."""
        text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        with self._changed:
            self._gone.setdefault(mesh_rank, text)
            self._changed.notify_all()

    def run(self, function: Callable[[Communicator], T]) -> list[T]:
        """Run ``function(communicator)`` on every rank, one thread each; return results in order.

        Raise the first failing rank's exception. Backward runs on the rank's own thread even if
        ranks share a device, because torch's single thread per device could wait for itself.
        """
        results: dict[int, T] = {}
        failures: list[tuple[int, BaseException]] = []
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def run_rank(communicator: Communicator) -> None:
            try:
                with (
                    torch.inference_mode(inference),
                    torch.set_grad_enabled(grad),
                    torch.autograd.set_multithreading_enabled(False),
                ):
                    results[communicator.mesh_rank] = function(communicator)
                self.abort(communicator.mesh_rank, "it has ended")
            except BaseException as cause:
                failures.append((communicator.mesh_rank, cause))
                self.abort(communicator.mesh_rank, cause)

        self.reset()
        threads = [
            threading.Thread(
                target=run_rank, args=(c,), name=f"mesh rank {c.mesh_rank}", daemon=True
            )
            for c in self.communicators
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            own = [f for f in failures if not isinstance(f[1], PeerLostError)]
            raise (own or failures)[0][1]
        return [results[place] for place in range(self.mesh.size)]

    def start(
        self,
        mesh_rank: int,
        mesh_ranks: tuple[int, ...],
        kind: tuple[Any, ...],
        part: torch.Tensor,
        combine: _Combine,
        note: Any = None,
    ) -> _RendezvousHandle:
        """Add a part to the group's next rendezvous; ``kind`` must be equal on all ranks."""
        with self._changed:
            turn = self._turns.get((mesh_ranks, mesh_rank), 0)
            self._turns[mesh_ranks, mesh_rank] = turn + 1
            meeting = self._meetings.setdefault((mesh_ranks, turn), _Rendezvous())
            meeting.parts[mesh_rank] = part
            meeting.kinds[mesh_rank], meeting.notes[mesh_rank] = kind, note
            complete = len(meeting.parts) == len(mesh_ranks)
            if complete:
                del self._meetings[mesh_ranks, turn]
        if complete:
            try:
                results = _compute(meeting, mesh_ranks, combine)
            except BaseException as cause:
                with self._changed:
                    meeting.failed = f"mesh rank {mesh_rank} failed: {cause}"
                    self._changed.notify_all()
                raise
            with self._changed:
                meeting.results = results
                self._changed.notify_all()
        return _RendezvousHandle(self, mesh_rank, mesh_ranks, meeting)

    def finish(
        self, mesh_rank: int, mesh_ranks: tuple[int, ...], meeting: _Rendezvous
    ) -> torch.Tensor:
        """Wait for the rendezvous; raise TransferTimeoutError or PeerLostError."""
        if meeting.results is None:
            limit = None if self.timeout == float("inf") else self.timeout

            def gone() -> list[int]:
                return [n for n in mesh_ranks if n in self._gone and n not in meeting.parts]

            def over() -> bool:
                return meeting.results is not None or meeting.failed is not None or bool(gone())

            with self._changed:
                if not self._changed.wait_for(over, limit):
                    late = ", ".join(str(n) for n in mesh_ranks if n not in meeting.parts)
                    raise TransferTimeoutError(
                        self.timeout,
                        f"mesh rank {mesh_rank} waited {self.timeout:g} s for mesh ranks {late}",
                    )
                if meeting.failed is not None:
                    raise PeerLostError(meeting.failed)
                for lost in gone():
                    raise PeerLostError(
                        f"mesh rank {lost} of the mesh {self.mesh}: {self._gone[lost]}"
                    )
        assert meeting.results is not None
        return meeting.results[mesh_rank]


def _compute(
    meeting: _Rendezvous, mesh_ranks: tuple[int, ...], combine: _Combine
) -> dict[int, torch.Tensor]:
    """Return each rank's result of a complete rendezvous, on its own device."""
    parts = [meeting.parts[mesh_rank] for mesh_rank in mesh_ranks]
    if len(set(meeting.kinds.values())) > 1:
        kinds = ", ".join(
            f"mesh rank {mesh_rank}: {meeting.kinds[mesh_rank]}" for mesh_rank in mesh_ranks
        )
        raise error("FXP900", where="a collective", why=f"the mesh ranks disagree: {kinds}", fix="")
    with torch.no_grad():
        near = [part.to(parts[0].device) for part in parts]
        made = combine(near, [meeting.notes[mesh_rank] for mesh_rank in mesh_ranks])
        return {n: t.to(p.device) for n, t, p in zip(mesh_ranks, made, parts, strict=True)}


class _InProcessCommunicator(Communicator):
    """A communicator that uses a hub."""

    def __init__(self, hub: InProcessHub, mesh_rank: int) -> None:
        super().__init__(hub.mesh, mesh_rank)
        self._hub = hub

    def _reduce(
        self, tensor: torch.Tensor, mesh_ranks: tuple[int, ...], op: str, reuse: bool
    ) -> _RendezvousHandle:
        def combine(parts: list[torch.Tensor], notes: list[Any]) -> list[torch.Tensor]:
            total = parts[0].clone()
            for part in parts[1:]:
                _add(total, part, op)
            return [total, *(total.clone() for _ in parts[1:])]

        kind = ("all_reduce", op, tuple(tensor.shape), tensor.dtype)
        return self._hub.start(self.mesh_rank, mesh_ranks, kind, tensor, combine)

    def _gather(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> _RendezvousHandle:
        def combine(parts: list[torch.Tensor], notes: list[Any]) -> list[torch.Tensor]:
            assert [part.numel() for part in parts] == counts, "pieces are not as announced"
            return [torch.cat(parts) for _ in parts]

        kind = ("all_gather", tuple(counts), flat.dtype)
        return self._hub.start(self.mesh_rank, mesh_ranks, kind, flat, combine)

    def _scatter(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], counts: list[Size]
    ) -> _RendezvousHandle:
        def combine(parts: list[torch.Tensor], notes: list[Any]) -> list[torch.Tensor]:
            rows = list(zip(*(part.split(counts) for part in parts), strict=True))
            totals = [row[0].clone() for row in rows]
            for total, row in zip(totals, rows, strict=True):
                for part in row[1:]:
                    total += part
            return totals

        kind = ("reduce_scatter", tuple(counts), flat.dtype)
        return self._hub.start(self.mesh_rank, mesh_ranks, kind, flat, combine)

    def _exchange(
        self, flat: torch.Tensor, mesh_ranks: tuple[int, ...], give: list[Size], get: list[Size]
    ) -> _RendezvousHandle:
        def combine(parts: list[torch.Tensor], notes: list[Any]) -> list[torch.Tensor]:
            for place, (_, received) in enumerate(notes):
                assert [given[place] for given, _ in notes] == received, "not as announced"
            rows = [part.split(given) for part, (given, _) in zip(parts, notes, strict=True)]
            return [torch.cat(column) for column in zip(*rows, strict=True)]

        kind = ("all_to_all", flat.dtype)
        return self._hub.start(self.mesh_rank, mesh_ranks, kind, flat, combine, (give, get))


def _add(total: torch.Tensor, part: torch.Tensor, op: str) -> None:
    if op == "max":
        torch.maximum(total, part, out=total)
    else:
        total += part
