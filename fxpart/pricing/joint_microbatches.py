"""Into how many microbatches a batch may be cut, and the rows that each replica then has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpart.errors import error
from fxpart.pricing.joint_space import SearchSpace, microbatch_counts
from fxpart.pricing.variants import BatchSplit, Sizes, captured_rows
from fxpart.solver.joint.problem import count_microbatch_rows

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel


class MicrobatchRows:
    """One batch. counts: of microbatches to choose from; fixed: rows of a graph with a fixed batch.

    Sizes at equal rows are one object.
    """

    def __init__(
        self, captured: CapturedModel, batch: int, wish: int | None, space: SearchSpace, stages: int
    ) -> None:
        """wish: the one count, None for all; stages: at most. FXP105 where it cannot be cut so."""
        self.captured, self.batch = captured, batch
        self.fixed = 0 if captured.symbolic else captured_rows(captured)
        self.counts = self._counts(wish, space, stages)
        self._sizes: dict[int, Sizes] = {}

    def _counts(self, wish: int | None, space: SearchSpace, stages: int) -> tuple[int, ...]:
        """The numbers of microbatches; FXP105 where the batch cannot be cut so."""
        batch, fixed = self.batch, self.fixed
        asked = (wish,) if wish is not None else space.microbatches
        if batch < 1 or any(not 1 <= m <= batch for m in asked or ()):
            raise error(
                "FXP105",
                where=f"batch of {batch}, {wish or 'any number of'} microbatches",
                why="every microbatch needs at least one row",
                fix="give a larger batch or fewer microbatches",
            )
        if not fixed:
            return tuple(sorted(set(asked or microbatch_counts(batch, stages))))
        whole = batch // fixed if batch % fixed == 0 else 0
        found = [m for m in asked or range(1, whole + 1) if whole and whole % m == 0]
        if not found:
            raise error(
                "FXP105",
                where=f"batch of {batch}" + (f" in {wish} microbatches" if wish else ""),
                why=f"the model could only be captured with a fixed batch, here of {fixed} rows",
                fix=f"capture at the microbatch size you want, or give a batch that {fixed} "
                "divides",
            )
        return tuple(sorted(set(found)))

    def of(self, microbatches: int, data: int) -> int:
        """Rows of a microbatch on a replica; 0 where it cannot be had."""
        rows = count_microbatch_rows(self.batch, microbatches, data)
        even = rows == self.fixed and rows * microbatches * data == self.batch
        return rows if not self.fixed or even else 0

    def at(self, rows: int) -> Sizes:
        """All sizes at so many rows."""
        if rows not in self._sizes:
            self._sizes[rows] = Sizes(self.captured, BatchSplit(rows, 1))
        return self._sizes[rows]

    def needed(self) -> list[int]:
        """Rows that some count of microbatches and power of two of replicas leave to each."""
        degrees = [1 << k for k in range(15)]
        rows = {r for m in self.counts for d in degrees if (r := self.of(m, d))}
        return sorted(rows) or [self.batch]

    @property
    def reference(self) -> Sizes:
        """Where is decided what is made again: the middle of the rows needed."""
        return self.at(self.needed()[len(self.needed()) // 2])

    @property
    def unknown(self) -> set[str]:
        """Symbols that only the run can tell."""
        return set().union(*(sizes.unknown for sizes in self._sizes.values()))
