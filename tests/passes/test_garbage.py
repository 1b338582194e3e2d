"""Garbage is looked for less often while a model is compiled, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from torch import fx, nn
from zoo import ZOO

import fxpart
from fxpart.compiler.garbage_collection import EVERY, reduce_garbage_collection


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_less_often_and_as_before() -> None:
    with reduce_garbage_collection():
        assert gc.get_threshold() == (EVERY, 10, 10)
        with reduce_garbage_collection():
            assert gc.get_threshold() == (EVERY, 10, 10)
    assert gc.get_threshold() == (700, 10, 10)
    with pytest.raises(ValueError, match="why"), reduce_garbage_collection():
        raise ValueError("why")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("given", [0, EVERY, 10**6])
def test_off_or_seldom_stays(given: int) -> None:
    gc.set_threshold(given, 10, 10)
    with reduce_garbage_collection():
        assert gc.get_threshold() == (given, 10, 10)


@pytest.mark.slow
def test_a_model_is_traced_under_it(capsys: pytest.CaptureFixture[str]) -> None:
    """What a traced model prints stays; what it appends to a list is taken back."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ZOO["mlp"].build().model

        def forward(self, x: fx.Proxy) -> fx.Proxy:
            print(gc.get_threshold()[0])  # noqa: T201
            return self.inner(x)  # type: ignore[no-any-return]

    built = ZOO["mlp"].build()
    fxpart.compile(Watched(), "local:1", example_inputs=built.batch, loss=built.loss, check="off")
    assert set(capsys.readouterr().out.split()) == {str(EVERY)}
    assert gc.get_threshold() == (700, 10, 10)
