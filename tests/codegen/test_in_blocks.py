"""Tables that are made some rows at a time: the same numbers, whatever part a rank holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fxpart.codegen.blockwise_init import InBlocks
from fxpart.errors import FxpartError


def made(
    rows: int, shape: tuple[int, ...], slices: tuple[slice, ...] | None, folder: Path | None = None
) -> torch.Tensor:
    """As :func:`fxpart.codegen.materialization` has it made."""
    calls: list[tuple[int, ...]] = []

    def init(name: str, like: torch.Tensor) -> torch.Tensor:
        calls.append(tuple(like.shape))
        return torch.rand(like.shape)

    def seeded(index: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(100 + index)
        return make()

    found = InBlocks(init, rows, folder=folder).part(
        "t", torch.empty(shape, device="meta"), slices, seeded
    )
    if shape and shape[0] > rows:
        assert max((s[0] for s in calls), default=0) <= rows
    return found


@pytest.mark.parametrize("rows", [1, 3, 4, 10, 11, 100])
@pytest.mark.parametrize("shape", [(10,), (10, 4), (10, 4, 2)])
def test_parts_are_those_of_the_whole(rows: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    whole = made(rows, shape, None)
    assert whole.shape == shape
    mapped = made(rows, shape, None, tmp_path)
    assert torch.equal(mapped, whole)
    assert bool(mapped.untyped_storage().filename) is (rows < 10) and not [*tmp_path.iterdir()]
    for start, stop in ((0, 10), (0, 3), (3, 7), (9, 10), (5, 5)):
        cut = (slice(start, stop), *(slice(0, 2) for _ in shape[1:]))
        assert torch.equal(made(rows, shape, cut), whole[cut])
        assert torch.equal(made(rows, shape, cut, tmp_path), whole[cut])


def test_a_number_is_made_at_once() -> None:
    assert made(4, (), None).shape == ()


def test_a_folder_that_cannot_have_the_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FxpartError, match="8,000,000 bytes free") as caught:
        made(4, (1000, 2000), None, tmp_path / "none")
    assert caught.value.code == "FXP110"


def test_blocks_have_rows() -> None:
    with pytest.raises(ValueError, match="rows=0"):
        InBlocks(lambda name, like: like, 0)


def test_another_shape_is_given_back() -> None:
    wrong = InBlocks(lambda name, like: torch.zeros(2, 2), 3)
    like = torch.empty(10, 4, device="meta")
    assert wrong.part("t", like, None, lambda index, make: make()).shape == (2, 2)
