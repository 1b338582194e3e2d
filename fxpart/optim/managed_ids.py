"""Rows of a fixed table for any number of ids: admission after some uses, eviction after disuse."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fxpart.errors import error

_FIELDS = "ids", "rows", "seen", "used"
_NO_ROW = -1
_EMPTY = torch.iinfo(torch.long).max  # an id that no batch has
Fields = dict[str, torch.Tensor]


@dataclass(frozen=True)
class RowAssignment:
    """The result of :meth:`ManagedIds.assign`.

    rows: of each given id. fresh: ascending rows that ids of the batch get. state: of the ids after
    the batch. step: its number. digest: of the ids.
    """

    rows: torch.Tensor
    fresh: torch.Tensor
    state: Fields
    step: int
    digest: int


class ManagedIds:
    """Maps ids from an unlimited range to the rows of one embedding table.

    An id that has been seen ``admit`` times, the current batch included, gets a row of its own; all
    others share the default row 0. An id that no batch has had for ``evict`` updates is forgotten,
    and its row is free; None: never. A row starts with normal random numbers of deviation ``std``
    and without optimizer state whenever an id gets it. If no row is free, the ids wait, and those
    that were seen most often come first. At most ``candidates`` ids without a row are counted, by
    default as many as the table has rows; of more, those unused for longest are forgotten, and of
    these the ones that were seen least. Memory is fixed: 32 bytes for each row and candidate, which
    every batch reads.

    inputs: of the batch with the ids, as keys or positions. column: their index in the last dim, if
    it has ids of several tables. padding: an id that always has the row of this number.

        users = ManagedIds("table.weight", "user", rows=100_000, admit=3, evict=10_000)
        trainer = program.trainer(optimizer, managed_ids=[users])
        trainer.step(batch)                                  # batch["user"] has the ids

    In a single process: ``found = users.assign(ids, step)``, ``users.reset_rows(found, weight,
    optimizer)``, a training step with ``found.rows``, and ``users.commit(found)``. Compare the
    managed collisions of torchrec and CountFilterEntry of PaddlePaddle. Raises FXP109 for options
    out of range.
    """

    def __init__(
        self,
        table: str,
        *inputs: str | int,
        rows: int,
        admit: int = 1,
        evict: int | None = None,
        candidates: int | None = None,
        column: int | None = None,
        padding: int | None = None,
        std: float = 0.01,
        seed: int = 0,
    ) -> None:
        candidates = rows if candidates is None else candidates
        for name, value, least in (
            ("rows", rows, 2), ("admit", admit, 1), ("evict", evict, 1),
            ("candidates", candidates, 0), ("padding", padding, 0), ("std", std, 0),
        ):  # fmt: skip
            if value is not None and not value >= least:
                self._reject(f"{name}={value!r}", f"use a number of at least {least}")
        if padding is not None and padding >= rows:
            self._reject(f"padding={padding}, rows={rows}", "use the number of a row")
        self.table, self.inputs, self.rows, self.column = table, inputs, rows, column
        self._admit, self._evict, self._candidates = admit, evict, candidates
        self._padding, self._std, self._seed = padding, std, seed
        self._default = int(padding == 0)
        size = rows + candidates
        self._state = _pad({name: torch.empty(0, dtype=torch.long) for name in _FIELDS}, size)

    def __repr__(self) -> str:
        """Return all options."""
        return (
            f"ManagedIds({self.table!r}, {self.inputs}, rows={self.rows}, admit={self._admit}, "
            f"evict={self._evict}, candidates={self._candidates}, column={self.column}, "
            f"padding={self._padding}, std={self._std}, seed={self._seed})"
        )

    def digest_state(self) -> str:
        """Return a digest of the state."""
        digest = hashlib.blake2b(digest_size=7)
        for tensor in self._state.values():
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def state_dict(self) -> Fields:
        """Return the state, of fixed shapes: ids, their rows, counts and last steps."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load the state of an object with as many rows and candidates."""
        for name, tensor in self._state.items():
            tensor.copy_(state[name])

    def assign(
        self, ids: torch.Tensor, step: int, after: RowAssignment | None = None
    ) -> RowAssignment:
        """Return the rows of a batch's ids in update ``step``. Nothing changes until the commit.

        after: of the batch before, if it is not committed yet.
        """
        given, places, counts = torch.unique(
            ids.reshape(-1).to("cpu", torch.long), return_inverse=True, return_counts=True
        )
        if len(given) and given[-1] == _EMPTY:
            raise error(
                "FXP105", where=f"ids of {self.table}", why=f"{_EMPTY} marks entries without an id",
                fix="use another id",
            )  # fmt: skip
        counted = torch.ones_like(given, dtype=torch.bool)
        if self._padding is not None:
            counted = given != self._padding
        state = self._forget_unused(self._state if after is None else after.state, step)
        state, at = _insert(state, given[counted])
        state["seen"][at] += counts[counted]
        state["used"][at] = step
        fresh = self._admit_ids(state, at)
        state = self._limit_candidates(state)
        rows = self._find_rows(state, given)[places].view(ids.shape)
        size = self.rows + self._candidates
        digest = int(((given ^ (given >> 29)) * 0x5851F42D4C957F2D * (2 * counts + 1)).sum())
        return RowAssignment(rows.to(ids.device), fresh, _pad(state, size), step, digest)

    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids, and count nothing."""
        found = self._find_rows(self._state, ids.reshape(-1).to("cpu", torch.long))
        return found.view(ids.shape).to(ids.device)

    def commit(self, assignment: RowAssignment) -> None:
        """Count the ids of a batch."""
        self._state = assignment.state

    def reset_rows(
        self,
        assignment: RowAssignment,
        weight: torch.Tensor,
        optimizer: torch.optim.Optimizer | None,
        part: tuple[slice, slice] | None = None,
        width: int | None = None,
    ) -> None:
        """Initialize the rows that an id gets, and their optimizer state.

        weight: the table, or the ``part`` of a table of this ``width``.
        """
        fresh, rows, columns = assignment.fresh, *(part or (slice(None), slice(None)))
        if not len(fresh):
            return
        text = f"{self._seed} {self.table} {assignment.step} {int(fresh[0])}"
        digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        values = torch.randn(len(fresh), width or weight.shape[1], generator=generator) * self._std
        start, stop, _ = rows.indices(self.rows)
        mine = (fresh >= start) & (fresh < stop)
        own = (fresh[mine] - start).to(weight.device)
        with torch.no_grad():
            weight.index_copy_(0, own, values[mine][:, columns].to(weight.device, weight.dtype))
            if optimizer is not None and weight in optimizer.state:
                group = next(
                    g for g in optimizer.param_groups if any(p is weight for p in g["params"])
                )
                start_value = float(group.get("initial_accumulator_value", 0.0))
                state = optimizer.state[weight]
                for name, tensor in state.items():
                    if isinstance(tensor, torch.Tensor) and tensor.shape[:1] == weight.shape[:1]:
                        state[name] = _fill_rows(tensor, own, start_value if name == "sum" else 0.0)

    # -- internals --------------------------------------------------------------------------------

    def _forget_unused(self, state: Fields, step: int) -> Fields:
        """Return the fields of the ids that are kept, without padding."""
        kept = state["ids"] != _EMPTY
        if self._evict is not None:
            kept &= step - state["used"] < self._evict
        return {name: tensor[kept] for name, tensor in state.items()}

    def _admit_ids(self, state: Fields, at: torch.Tensor) -> torch.Tensor:
        """Give rows to ids of the batch at these positions; return the rows, ascending."""
        waiting = at[(state["rows"][at] == _NO_ROW) & (state["seen"][at] >= self._admit)]
        free = torch.ones(self.rows, dtype=torch.bool)
        free[self._default] = False
        if self._padding is not None:
            free[self._padding] = False
        free[state["rows"][state["rows"] != _NO_ROW]] = False
        order = torch.argsort(state["seen"][waiting], descending=True, stable=True)
        fresh = free.nonzero().squeeze(1)[: len(waiting)]
        state["rows"][waiting[order[: len(fresh)]]] = fresh
        return fresh

    def _limit_candidates(self, state: Fields) -> Fields:
        """Forget candidates beyond their largest number."""
        candidates = (state["rows"] == _NO_ROW).nonzero().squeeze(1)
        surplus = len(candidates) - self._candidates
        if surplus <= 0:
            return state
        for name in ("seen", "used"):
            order = torch.argsort(state[name][candidates], stable=True)
            candidates = candidates[order]
        kept = torch.ones_like(state["ids"], dtype=torch.bool)
        kept[candidates[:surplus]] = False
        return {name: tensor[kept] for name, tensor in state.items()}

    def _find_rows(self, state: Fields, ids: torch.Tensor) -> torch.Tensor:
        """Return the row of each id."""
        found = torch.full_like(ids, self._default)
        if len(state["ids"]):
            at = torch.searchsorted(state["ids"], ids).clamp(max=len(state["ids"]) - 1)
            known = (state["ids"][at] == ids) & (state["rows"][at] != _NO_ROW)
            found[known] = state["rows"][at[known]]
        if self._padding is not None:
            found[ids == self._padding] = self._padding
        return found

    def _reject(self, where: str, fix: str) -> None:
        raise error(
            "FXP109", where=f"ManagedIds({where})", why="the value is out of range", fix=fix
        )


def _insert(state: Fields, ids: torch.Tensor) -> tuple[Fields, torch.Tensor]:
    """Return the fields with ascending ids inserted, and the positions of the ids."""
    old = state["ids"]
    at = torch.searchsorted(old, ids)
    new = torch.ones_like(ids, dtype=torch.bool)
    if len(old):
        new = old[at.clamp(max=len(old) - 1)] != ids
    at += new.cumsum(0) - new.long()
    present = torch.ones(len(old) + int(new.sum()), dtype=torch.bool)
    present[at[new]] = False
    found = {}
    for name, value in (("ids", 0), ("rows", _NO_ROW), ("seen", 0), ("used", 0)):
        found[name] = old.new_full((len(present),), value)
        found[name][present] = state[name]
    found["ids"][at] = ids
    return found, at


def _pad(state: Fields, size: int) -> Fields:
    """Return the fields with ``size`` entries."""
    found = {}
    for name, tensor in state.items():
        filler = _EMPTY if name == "ids" else _NO_ROW if name == "rows" else 0
        found[name] = torch.cat([tensor, tensor.new_full((size - len(tensor),), filler)])
    return found


def _fill_rows(tensor: torch.Tensor, rows: torch.Tensor, value: float) -> torch.Tensor:
    """Return optimizer state with the rows filled; sparse state without them."""
    if not tensor.is_sparse:
        return tensor.index_fill_(0, rows, value)
    tensor = tensor.coalesce()
    kept = ~torch.isin(tensor.indices()[0], rows)
    return torch.sparse_coo_tensor(
        tensor.indices()[:, kept], tensor.values()[kept], tensor.shape, check_invariants=False
    ).coalesce()
