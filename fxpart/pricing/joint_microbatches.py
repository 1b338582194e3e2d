"""The allowed numbers of microbatches, and the rows of each replica."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxpart.errors import error
from fxpart.pricing.joint_space import SearchSpace, microbatch_counts
from fxpart.pricing.variants import BatchSplit, Sizes, captured_rows
from fxpart.solver.joint.problem import count_microbatch_rows

if TYPE_CHECKING:
    from fxpart.capture.captured_model import CapturedModel


class MicrobatchRows:
    """One batch. counts: candidate numbers of microbatches; fixed: rows of a fixed-batch graph.

    Sizes at equal rows are one object.
    """

    def __init__(
        self,
        captured: CapturedModel,
        batch: int,
        requested: int | None,
        space: SearchSpace,
        stages: int,
    ) -> None:
        """Create it. requested: the only count, None for all; stages: the most. Raises FXP105."""
        self.captured, self.batch = captured, batch
        self.fixed = 0 if captured.symbolic else captured_rows(captured)
        self.counts = self._counts(requested, space, stages)
        self._sizes: dict[int, Sizes] = {}

    def _counts(self, requested: int | None, space: SearchSpace, stages: int) -> tuple[int, ...]:
        """Return the numbers of microbatches; FXP105 where the batch cannot be split so."""
        batch, fixed = self.batch, self.fixed
        allowed = (requested,) if requested is not None else space.microbatches
        if batch < 1 or any(not 1 <= m <= batch for m in allowed or ()):
            raise error(
                "FXP105",
                where=f"batch of {batch}, {requested or 'any number of'} microbatches",
                why="every microbatch needs at least one row",
                fix="use a larger batch or fewer microbatches",
            )
        if not fixed:
            return tuple(sorted(set(allowed or microbatch_counts(batch, stages))))
        whole = batch // fixed if batch % fixed == 0 else 0
        found = [m for m in allowed or range(1, whole + 1) if whole and whole % m == 0]
        if not found:
            raise error(
                "FXP105",
                where=f"batch of {batch}" + (f" in {requested} microbatches" if requested else ""),
                why=f"the model could only be captured with a fixed batch, here of {fixed} rows",
                fix=f"capture at the desired microbatch size, or use a batch that {fixed} divides",
            )
        return tuple(sorted(set(found)))

    def of(self, microbatches: int, data: int) -> int:
        """Return the rows of a microbatch on a replica; 0 where they are not possible."""
        rows = count_microbatch_rows(self.batch, microbatches, data)
        even = rows == self.fixed and rows * microbatches * data == self.batch
        return rows if not self.fixed or even else 0

    def at(self, rows: int) -> Sizes:
        """Return all sizes for a number of rows."""
        if rows not in self._sizes:
            self._sizes[rows] = Sizes(self.captured, BatchSplit(rows, 1))
        return self._sizes[rows]

    def needed(self) -> list[int]:
        """Return the rows per replica, for every count and every power of two of replicas."""
        degrees = [1 << k for k in range(15)]
        rows = {r for m in self.counts for d in degrees if (r := self.of(m, d))}
        return sorted(rows) or [self.batch]

    @property
    def reference(self) -> Sizes:
        """Return the sizes for which recomputation is selected: the middle of the needed rows."""
        return self.at(self.needed()[len(self.needed()) // 2])

    @property
    def unknown(self) -> set[str]:
        """Return the symbols that are only known at run time."""
        return set().union(*(sizes.unknown for sizes in self._sizes.values()))
