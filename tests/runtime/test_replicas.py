"""Stages of several copies: microbatches in turn, the gradients of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from ranks import Pool
from torch import nn

import fxpart
from fxpart.codegen.materialization import materialize
from fxpart.codegen.stage_loader import load_stage
from fxpart.errors import FxpartError
from fxpart.program.edges import find_stage_edges, find_value_edges
from fxpart.program.replicas import get_original_stage, replicate_stages
from fxpart.program.spec import ProgramSpec
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.transport.interface import STATE
from fxpart.schedule.make import make


class Tied(nn.Module):
    """An embedding that the head shares, a skip, and a few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.embed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + first)


def batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randint(0, 11, (rows,), generator=generator) for _ in range(2))  # type: ignore[return-value]


@cache
def program(stages: int) -> fxpart.api.Program:
    torch.manual_seed(0)
    return fxpart.compile(
        Tied(), f"local:{stages}", example_inputs=batch(), loss=nn.functional.cross_entropy,
        microbatches=6, constraints={"mesh": "none", "stages": stages, "granularity": "op"},
    )  # fmt: skip


def copied(
    compiled: fxpart.api.Program, counts: Sequence[int], transport: object, name: str, clip: float
) -> Trainer:
    """A trainer of so many copies of each stage, one a rank."""
    spec = replicate_stages(compiled.spec, [range(n) for n in counts])
    here = [k for k in range(len(spec.stages)) if k in transport.local]  # type: ignore[attr-defined]
    of = {k: get_original_stage(spec, k) for k in here}
    modules = {k: load_stage(compiled.sources[j], spec.stages[k]) for k, j in of.items()}
    for module in modules.values():
        materialize(module, spec, compiled.captured.state)
    return Trainer(
        spec, modules, ranks=range(len(spec.stages)), transport=transport,  # type: ignore[arg-type]
        microbatches=6, schedule=name, clip_norm=clip,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    )  # fmt: skip


def trained(counts: Sequence[int], name: str, transport: object, steps: int = 4) -> tuple:  # type: ignore[type-arg]
    """Losses and parameters after some steps, the last of a smaller batch."""
    trainer = copied(program(len(counts)), counts, transport, name, clip=0.7)
    rows = [12] * (steps - 1) + [4]
    losses = [float(trainer.step(batch(n))) for n in rows]
    norm = float(trainer.last_grad_norm)  # type: ignore[arg-type]
    state = trainer.state_dict()
    trainer.close()
    return losses, norm, {k: v.numpy() for k, v in state.items()}


@cache
def alone(steps: int = 4) -> tuple:  # type: ignore[type-arg]
    """The same in one process, without fxpart."""
    torch.manual_seed(0)
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses, norm = [], 0.0
    for rows in [12] * (steps - 1) + [4]:
        x, y = batch(rows)
        loss = nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.7))
        optimizer.step()
    return losses, norm, {k: v.detach().numpy() for k, v in model.state_dict().items()}


def check(found: tuple, wanted: tuple) -> None:  # type: ignore[type-arg]
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1] == pytest.approx(wanted[1], rel=1e-4)
    assert found[2].keys() == wanted[2].keys()
    for name, value in wanted[2].items():
        assert found[2][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("counts", [(2, 3), (1, 2), (3, 1), (2, 1, 2)])
def test_the_numbers_of_one_process(counts: tuple[int, ...], name: str) -> None:
    check(trained(counts, name, InProcess(sum(counts))), alone())


class Watched(InProcess):
    """Notes the bytes of messages about state, and how many were on their way at once."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.sizes: list[int] = []

    def send(self, source: int, target: int, channel: int, tensor: torch.Tensor) -> torch.Tensor:
        if channel == STATE:
            self.sizes.append(tensor.numel() * tensor.element_size())
        return super().send(source, target, channel, tensor)


@pytest.mark.slow
def test_gradients_are_summed_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits; no message is larger than a bucket, which the embedding (352 bytes) is."""
    once, often = Watched(5), Watched(5)
    whole = trained((2, 3), "1f1b", once)
    monkeypatch.setattr(reduce_scatter, "BUCKET", 300)  # bytes: a layer has 256 and 32
    losses, norm, state = trained((2, 3), "1f1b", often)
    assert (losses, norm) == whole[:2]
    assert {k: v.tobytes() for k, v in state.items()} == {
        k: v.tobytes() for k, v in whole[2].items()
    }
    assert max(once.sizes) > 352 == max(often.sizes) and len(often.sizes) > len(once.sizes)


def _over_gloo(counts: tuple[int, ...]) -> tuple:  # type: ignore[type-arg]
    from fxpart.runtime import connect

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduce_scatter, "BUCKET", 300)
        return trained(counts, "1f1b", connect(sum(counts)))


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(1, 2), (3, 1)])
def test_over_gloo(pool: Pool, counts: tuple[int, ...]) -> None:
    for found in pool.run(_over_gloo, counts, ranks=sum(counts)):
        check(found, alone())


@pytest.mark.slow
def test_every_copy_is_fed_by_every_copy() -> None:
    spec = replicate_stages(program(2).spec, ((0, 1), (0, 1, 2)))
    assert spec.replicas == ((0, 1), (2, 3, 4))
    pairs = {(e.source, e.target) for e in find_stage_edges(spec)}
    assert pairs == {(a, b) for a in (0, 1) for b in (2, 3, 4)}
    assert all(link.back == link.source for link in find_value_edges(spec))
    schedule = make("1f1b", range(5), 6, find_stage_edges(spec), replicas=spec.replicas)
    assert [schedule.runs(3, m) for m in range(6)] == [False, True, False] * 2
    assert [get_original_stage(spec, k) for k in range(5)] == [0, 0, 1, 1, 1]


def test_one_copy_each_changes_nothing() -> None:
    spec = program(2).spec
    assert replicate_stages(spec, ((0,), (0,))) is spec


@pytest.mark.parametrize("rounds", [[(0, 1)], [(), (0,)], [(0,), (0, 1), (0,)], [], [(0, 2), (0,)]])
def test_rounds_that_do_not_fit_are_refused(rounds: list[tuple[int, ...]]) -> None:
    spec: ProgramSpec = program(2).spec
    with pytest.raises(FxpartError) as caught:
        replicate_stages(spec, rounds)
    assert caught.value.code == "FXP109"
