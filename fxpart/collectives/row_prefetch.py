"""Rows of the next step's lookups, which are requested while a step computes.

The ids of all lookups of a step are exchanged ahead, in one message to each rank, and rows that the
running step does not look up are received ahead of its update. The owner of a row keeps the bits
that it sent. Before the first lookup of the next step it sends the rows that have other bits by
then, and those that it had not sent, so that the step reads current rows, whatever has changed
them. Each row is sent once for all microbatches of a step. The input pipelines of torchrec
exchange the ids ahead in the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

from fxpart.collectives.all_to_all_embedding import (
    RowLookup,
    RowRequest,
    check_ids,
    get_row_ranges,
)
from fxpart.collectives.communicator import CollectiveHandle, Communicator
from fxpart.collectives.factor_shares import Axes
from fxpart.errors import error

# Of each stage and microbatch, in the order of the forward.
Requests = Sequence[Sequence[RowRequest]]


class _TableLookups:
    """What a step looks up in one table.

    numbers: of its requests. ids: of all of them, ascending, of which ``fetch`` are on each rank.
    theirs: local rows that the ranks look up here, ``serve`` of each rank, ascending for each.
    rows: of ``ids``. sent: which of ``theirs`` were sent ahead, and their bits.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.numbers: list[int] = []
        self.ids = self.theirs = torch.empty(0, dtype=torch.long, device=weight.device)
        self.fetch: list[int] = []
        self.serve: list[int] = []
        self.rows = weight.detach()[:0]
        self.sent: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def width(self) -> int:
        """Elements of a row."""
        return self.weight.shape[1]

    def select_rows(self, mask: torch.Tensor) -> torch.Tensor:
        """Return the current rows of a mask of ``theirs``."""
        return self.weight.detach().index_select(0, self.theirs[mask])

    def find_changed_rows(self) -> torch.Tensor:
        """Return the mask of ``theirs`` whose current bits have not been sent."""
        changed = torch.ones_like(self.theirs, dtype=torch.bool)
        if self.sent is not None:
            mask, rows = self.sent
            now = self.select_rows(mask)
            changed[mask] = (now.view(torch.uint8) != rows.view(torch.uint8)).any(1)
        return changed


class _StepRows:
    """All lookups of a step that share the axes of their tables.

    requests: in the order of the forward. leads: whether each is the first of its microbatch.
    """

    def __init__(
        self,
        mesh: Communicator,
        axes: Axes,
        requests: Sequence[RowRequest],
        leads: Sequence[bool],
    ) -> None:
        """Sort the ids of the requests; raise IndexError for ids outside of a table."""
        self._mesh, self.axes = mesh, axes
        self.requests, self.leads = requests, leads
        self._ranks, self._place = mesh.size(axes), mesh.place(axes)
        self.tables: dict[int, _TableLookups] = {}
        for number, request in enumerate(requests):
            table = self.tables.setdefault(id(request.weight), _TableLookups(request.weight))
            table.numbers.append(number)
        sorts = [torch.sort(request.ids.long(), stable=True) for request in requests]
        self._ids, self._orders = [s.values for s in sorts], [s.indices for s in sorts]
        self._bounds = self._find_bounds(self._ids, requests)
        for ids, request, bounds in zip(self._ids, requests, self._bounds, strict=True):
            check_ids(ids, request.size, inside=bounds[0] == 0 and bounds[-1] == len(ids))
        self._give = [_differences(bounds) for bounds in self._bounds]
        self._places = [torch.empty_like(ids) for ids in self._ids]
        for table in self.tables.values():
            whole = torch.cat([self._ids[n] for n in table.numbers])
            unique = torch.unique if len(table.numbers) > 1 else torch.unique_consecutive
            table.ids, places = unique(whole, return_inverse=True)
            each = places.split([len(self._ids[n]) for n in table.numbers])
            for n, own in zip(table.numbers, each, strict=True):
                self._places[n][self._orders[n]] = own
        tables = self.tables.values()
        firsts = [requests[table.numbers[0]] for table in tables]
        found = self._find_bounds([table.ids for table in tables], firsts)
        for table, bounds in zip(tables, found, strict=True):
            table.fetch = _differences(bounds)
        self._get: list[list[int]] = []
        self._first: list[int] = []
        self._requested: list[torch.Tensor] = []
        self._received = 0
        self._arriving: list[
            tuple[CollectiveHandle, list[int], list[_TableLookups], list[torch.Tensor]]
        ] = []

    def _find_bounds(
        self, sorted_ids: Sequence[torch.Tensor], requests: Sequence[RowRequest]
    ) -> list[list[int]]:
        """Return where the ids of each rank start and end in each tensor of ascending ids."""
        found = []
        for ids, request in zip(sorted_ids, requests, strict=True):
            ranges = get_row_ranges(self._mesh, self.axes, request.size)
            ends = [0, *(first + count for first, count in ranges)]
            found.append(torch.searchsorted(ids, torch.tensor(ends, device=ids.device)))
        bounds: list[list[int]] = torch.stack(found).tolist()
        return bounds

    def exchange_ids(self) -> Iterator[None]:
        """Send all ids to the owners of their rows; yield while messages are under way."""
        count, ranks = len(self.requests), range(self._ranks)
        counts = [
            number
            for rank in ranks
            for give, request in zip(self._give, self.requests, strict=True)
            for number in (give[rank], request.own)
        ]
        device = self._ids[0].device
        each = [2 * count] * self._ranks
        handle = self._start(torch.tensor(counts, device=device), each, each)
        yield
        received = handle.wait().view(self._ranks, count, 2).tolist()
        self._get = [[received[rank][n][0] for rank in ranks] for n in range(count)]
        self._first = [sum(received[r][n][1] for r in range(self._place)) for n in range(count)]
        ids = torch.cat([
            ids[bounds[rank] : bounds[rank + 1]]
            for rank in ranks
            for ids, bounds in zip(self._ids, self._bounds, strict=True)
        ])  # fmt: skip
        totals = [
            [sum(own[rank] for own in way) for rank in ranks] for way in (self._give, self._get)
        ]
        handle = self._start(ids, *totals)
        yield
        parts = handle.wait().split([own[rank] for rank in ranks for own in self._get])
        for n, request in enumerate(self.requests):
            start, _ = get_row_ranges(self._mesh, self.axes, request.size)[self._place]
            self._requested.append(torch.cat(parts[n::count]) - start)
        self._find_served_rows()

    def _find_served_rows(self) -> None:
        """Find the distinct rows that each rank looks up in the tables here."""
        device, found = self._ids[0].device, []
        for table in self.tables.values():
            rows = max(len(table.weight), 1)
            sources = torch.cat([
                torch.repeat_interleave(torch.tensor(self._get[n], device=device))
                for n in table.numbers
            ])  # fmt: skip
            keys = torch.cat([self._requested[n] for n in table.numbers]) + sources * rows
            keys = torch.unique(keys)
            table.theirs = keys % rows
            ends = torch.arange(self._ranks + 1, device=device) * rows
            found.append(torch.searchsorted(keys, ends).diff())
        for table, serve in zip(self.tables.values(), torch.stack(found).tolist(), strict=True):
            table.serve = serve

    def send_unread_rows(self, running: _StepRows | None) -> Iterator[None]:
        """Start sending the rows that ``running`` does not look up, ahead of its update."""
        found = []
        for key, table in self.tables.items():
            mask = torch.full_like(table.theirs, running is not None, dtype=torch.bool)
            if running is not None and key in running.tables:
                torch.isin(table.theirs, running.tables[key].theirs, invert=True, out=mask)
            found.append((mask, table.select_rows(mask)))
            table.sent = found[-1]
        yield from self._send_rows(found)

    def send_changed_rows(self) -> Iterator[None]:
        """Store the rows that were sent ahead, and start sending those that have changed since."""
        self.store_rows()
        masks = [table.find_changed_rows() for table in self.tables.values()]
        tables = zip(masks, self.tables.values(), strict=True)
        yield from self._send_rows([(mask, table.select_rows(mask)) for mask, table in tables])
        self._mesh.counts.note_rows(self.axes, 0, self._received)

    def _send_rows(self, given: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
        """Start sending rows, one message for each dtype. given: by table a mask of ``theirs``,
        and the rows in it.
        """
        tables, ranks = list(self.tables.values()), range(self._ranks)
        count = len(tables)
        masks = [mask.split(table.serve) for (mask, _), table in zip(given, tables, strict=True)]
        ways = [table.serve for table in tables], [table.fetch for table in tables]
        flags = torch.cat([own[rank] for rank in ranks for own in masks]).to(torch.uint8)
        handle = self._start(
            flags, *([sum(n[rank] for n in way) for rank in ranks] for way in ways)
        )
        yield
        flags = handle.wait().bool()
        received = flags.split([table.fetch[rank] for rank in ranks for table in tables])
        coming = [list(received[at::count]) for at in range(count)]
        parts = [part.sum() for own in (*masks, *coming) for part in own]
        sizes = torch.stack(parts).view(2, count, self._ranks).tolist()
        self._received += sum(map(sum, sizes[1]))
        for dtype in dict.fromkeys(table.weight.dtype for table in tables):
            own = [at for at in range(count) if tables[at].weight.dtype == dtype]
            rows = {at: given[at][1].split(sizes[0][at]) for at in own}
            widths = [
                [sizes[way][at][rank] * tables[at].width for rank in ranks for at in own]
                for way in (0, 1)
            ]
            totals = ([sum(w[r * len(own) : (r + 1) * len(own)]) for r in ranks] for w in widths)
            flat = torch.cat([rows[at][rank].reshape(-1) for rank in ranks for at in own])
            handle = self._start(flat, *totals)
            wanted = [torch.cat(coming[at]).nonzero().squeeze(1) for at in own]
            self._arriving.append((handle, widths[1], [tables[at] for at in own], wanted))

    def store_rows(self) -> None:
        """Wait for the rows whose sending has started."""
        for handle, sizes, tables, wanted in self._arriving:
            parts = handle.wait().split(sizes)
            for at, (table, places) in enumerate(zip(tables, wanted, strict=True)):
                if len(table.rows) < len(table.ids):
                    table.rows = table.weight.detach().new_empty(len(table.ids), table.width)
                rows = torch.cat(parts[at :: len(tables)]).view(len(places), table.width)
                table.rows.index_copy_(0, places, rows)
        self._arriving.clear()

    def look_up(self, number: int, advance: Callable[[], None] | None) -> tuple[torch.Tensor, int]:
        """Return the rows of a request, and the sum of ``own`` over earlier ranks.

        advance: called before and after its gradient is sent.
        """
        self.store_rows()
        request, places = self.requests[number], self._places[number]
        table = self.tables[id(request.weight)]
        start, length = get_row_ranges(self._mesh, self.axes, request.size)[self._place]
        inside = start <= request.padding < start + length
        self._mesh.counts.note_rows(self.axes, len(places), 0)
        lookup = RowLookup(
            self._mesh, self.axes, self._orders[number],
            lambda _: table.rows.index_select(0, places), self._requested[number],
            (self._give[number], self._get[number]), request.padding - start if inside else -1,
            request.sparse, advance,
        )  # fmt: skip
        return lookup.apply(request.weight), self._first[number]

    def _start(
        self, flat: torch.Tensor, give: Sequence[int], get: Sequence[int]
    ) -> CollectiveHandle:
        return self._mesh.start_all_to_all(flat, self.axes, give, get)


def _differences(bounds: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


class RowPrefetch:
    """The prefetched rows of one communicator, whose ranks all make the same calls.

    The messages ahead advance at the first lookup of each microbatch, before and behind the
    gradient of that lookup, and at the end of the step.
    """

    def __init__(self, mesh: Communicator) -> None:
        """Prefetch nothing yet."""
        self._mesh = mesh
        self._prepared: list[_StepRows] = []
        self._now: list[_StepRows] = []
        self._ahead: list[_StepRows] = []
        self._failure: IndexError | None = None
        self._phases: Iterator[None] = iter(())
        self._begun = False
        self._waiting: dict[int, deque[tuple[_StepRows, int]]] = {}
        self._done: dict[int, list[tuple[_StepRows, int]]] = {}

    def prepare(self, ahead: Requests) -> None:
        """Note the lookups of the step behind the next one; IndexError for ids without a row."""
        self._prepared = []
        self._prepared = self._group(ahead)

    def begin(self, now: Requests) -> None:
        """Serve the lookups of a step from now on. now: its requests, unless they are known.

        Messages are sent from its first lookup on, which raises IndexError for ids without a row.
        """
        known, self._failure = self._ahead, None
        if not known:
            try:
                self._now = self._group(now)
            except IndexError as cause:
                self._now, self._failure = [], cause
        self._now = known or self._now
        self._ahead, self._prepared = self._prepared, []
        self._phases, self._begun = self._communicate(known=bool(known)), False
        self._waiting, self._done = {}, {}
        for step in self._now:
            for number, request in enumerate(step.requests):
                self._waiting.setdefault(id(request.weight), deque()).append((step, number))
        self._mesh.rows_ahead = self

    def take(self, request: RowRequest) -> tuple[torch.Tensor, int] | None:
        """Return the rows of a lookup and the sum of ``own`` over earlier ranks; None for others.

        A recomputed lookup returns the rows of the first one with its ids.
        """
        if self._failure is not None:
            raise self._failure
        key = id(request.weight)
        if torch._C._current_graph_task_id() != -1:  # This is a recomputation in a backward.
            for step, number in self._done.get(key, ()):
                if torch.equal(step.requests[number].ids, request.ids):
                    return step.look_up(number, None)
            return None
        if not self._waiting.get(key):
            return None
        step, number = self._waiting[key].popleft()
        if not torch.equal(step.requests[number].ids, request.ids):
            raise error(
                "FXP900", where="a prefetched lookup", why="its ids are not the announced ones"
            )
        lead = step.leads[number]
        if lead or not self._begun:
            self._advance()
        self._done.setdefault(key, []).append((step, number))
        return step.look_up(number, self._advance if lead else None)

    def end(self) -> None:
        """End the step: send all ids of the next one, and start sending its rows."""
        for _ in self._phases:
            pass
        self._mesh.rows_ahead = None
        self._now, self._waiting, self._done = [], {}, {}

    def finish(self) -> None:
        """Wait for the rows ahead, between two steps."""
        for step in self._ahead:
            step.store_rows()

    def clear(self) -> None:
        """Forget all steps."""
        self._mesh.rows_ahead, self._phases = None, iter(())
        self._prepared, self._now, self._ahead = [], [], []
        self._waiting, self._done = {}, {}

    def _advance(self) -> None:
        self._begun = True
        next(self._phases, None)

    def _communicate(self, *, known: bool) -> Iterator[None]:
        """Make the rows of this step current, then send ids and rows ahead; yield in between."""
        if not known:
            for step in self._now:
                for _ in step.exchange_ids():
                    pass
        ahead = self._send_ahead()
        next(ahead, None)
        for step in self._now:
            for _ in step.send_changed_rows():
                pass
        yield
        yield from ahead

    def _send_ahead(self) -> Iterator[None]:
        for step in self._ahead:
            yield from step.exchange_ids()
        for step in self._ahead:
            running = next((now for now in self._now if now.axes == step.axes), None)
            yield from step.send_unread_rows(running)

    def _group(self, requests: Requests) -> list[_StepRows]:
        """Return the requests by axes."""
        found: dict[Axes, list[tuple[RowRequest, bool]]] = {}
        for own in requests:
            for at, request in enumerate(own):
                found.setdefault(request.axes, []).append((request, at == 0))
        return [
            _StepRows(self._mesh, axes, [r for r, _ in own], [lead for _, lead in own])
            for axes, own in found.items()
        ]
