"""Rows for any number of ids: against a plain implementation with dictionaries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.errors import FxpartError
from fxpart.optim import ManagedIds, RowWiseAdagrad


class Plain:
    """The same rules, id by id."""

    def __init__(
        self, rows: int, admit: int, evict: int | None, candidates: int, padding: int | None
    ) -> None:
        self.rows, self.admit, self.evict = rows, admit, evict
        self.candidates, self.padding = candidates, padding
        self.known: dict[int, list[int]] = {}  # id -> row or -1, times seen, last step

    def assign(self, ids: list[int], step: int) -> tuple[list[int], list[int]]:
        """Rows of the ids, and those that an id gets."""
        if self.evict is not None:
            self.known = {i: e for i, e in self.known.items() if step - e[2] < self.evict}
        for i in ids:
            if i != self.padding:
                entry = self.known.setdefault(i, [-1, 0, 0])
                entry[1], entry[2] = entry[1] + 1, step
        default = int(self.padding == 0)
        taken = {default, self.padding, *(e[0] for e in self.known.values())}
        free = [r for r in range(self.rows) if r not in taken]
        waiting = [
            (-e[1], i) for i, e in self.known.items()
            if e[0] < 0 and e[1] >= self.admit and i in ids
        ]  # fmt: skip
        fresh = []
        for (_, i), row in zip(sorted(waiting), free, strict=False):
            self.known[i][0] = row
            fresh.append(row)
        rest = sorted((e[2], e[1], i) for i, e in self.known.items() if e[0] < 0)
        for _, _, i in rest[: max(len(rest) - self.candidates, 0)]:
            del self.known[i]
        rows = [
            i if i == self.padding else max(self.known.get(i, [default])[0], -1) for i in ids
        ]  # fmt: skip
        return [default if row < 0 else row for row in rows], fresh


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 6), st.integers(1, 3), st.sampled_from([None, 1, 2, 4]), st.integers(0, 5),
    st.sampled_from([None, 0, 1]), st.integers(0, 1000),
)  # fmt: skip
def test_rows_of_ids(
    rows: int, admit: int, evict: int | None, candidates: int, padding: int | None, seed: int
) -> None:
    managed = ManagedIds(
        "table.weight", "ids", rows=rows, admit=admit, evict=evict, candidates=candidates,
        padding=padding,
    )  # fmt: skip
    plain = Plain(rows, admit, evict, candidates, padding)
    draw = torch.Generator().manual_seed(seed)
    sizes = {name: len(t) for name, t in managed.state_dict().items()}
    for step in range(12):
        ids = (torch.randint(0, 12, (2, 3), generator=draw) - 3) * 10**17
        ids = torch.where(ids == 0, padding or 0, ids)
        found = managed.assign(ids, step)
        ahead = managed.assign(ids + 1, step + 1, after=found)
        managed.commit(found)
        assert torch.equal(ahead.rows, managed.assign(ids + 1, step + 1).rows)
        want, fresh = plain.assign(ids.reshape(-1).tolist(), step)
        assert found.rows.reshape(-1).tolist() == want
        assert sorted(found.fresh.tolist()) == fresh
        assert torch.equal(managed.look_up(ids), found.rows)
        state = managed.state_dict()
        assert {name: len(t) for name, t in state.items()} == sizes
        other = ManagedIds(
            "table.weight", "ids", rows=rows, admit=admit, evict=evict, candidates=candidates,
            padding=padding,
        )  # fmt: skip
        other.load_state_dict(state)
        managed = other


@pytest.mark.parametrize("kind", ["rowwise", "momentum"])
def test_a_row_starts_anew(kind: str) -> None:
    """With its optimizer state; other rows keep theirs. Parts are those of the whole."""
    managed = ManagedIds("table.weight", "ids", rows=6, evict=2)
    table = torch.nn.Parameter(torch.ones(6, 3))
    optimizer: torch.optim.Optimizer = RowWiseAdagrad([table], initial_accumulator_value=0.5)
    if kind == "momentum":
        optimizer = torch.optim.SGD([table], lr=0.1, momentum=0.9)
    for step, ids in enumerate(([7, 8], [8], [8, 9])):
        found = managed.assign(torch.tensor(ids), step)
        before = table.detach().clone()
        managed.reset_rows(found, table, optimizer)
        kept = torch.ones(6, dtype=torch.bool)
        kept[found.fresh] = False
        assert torch.equal(table[kept], before[kept])
        assert table[found.fresh].abs().max() < 0.1 if len(found.fresh) else step == 1
        part = torch.zeros(3, 2)
        managed.reset_rows(found, part, None, (slice(1, 4), slice(1, 3)), width=3)
        fresh = [row for row in found.fresh.tolist() if 1 <= row < 4]
        assert torch.equal(part[[row - 1 for row in fresh]], table[fresh, 1:].detach())
        managed.commit(found)
        if step == 2:
            assert found.rows.tolist() == [2, 1], "the row of 7 is free"
            state = optimizer.state[table]["sum" if kind == "rowwise" else "momentum_buffer"]
            state = state.to_dense() if state.is_sparse else state
            assert (state[1] == (0.5 if kind == "rowwise" else 0)).all() and (state[2] > 0.5).all()
        torch.nn.functional.embedding(found.rows, table, sparse=True).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_options_out_of_range() -> None:
    for options in ({"rows": 1}, {"admit": 0}, {"evict": 0}, {"padding": 9}):
        with pytest.raises(FxpartError, match="out of range") as caught:
            ManagedIds("table.weight", "ids", **({"rows": 4} | options))
        assert caught.value.code == "FXP109"
