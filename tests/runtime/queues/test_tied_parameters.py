"""Parameters that several stages hold, from queues: one process's numbers, and the same bits."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from queued_counted import Most
from queued_programs import sgd
from ranks import Pool
from torch import nn

import fxpart
from fxpart.errors import FxpartError
from fxpart.plan.model import Plan
from fxpart.planner.prediction.queue_memory import queued_row
from fxpart.planner.prediction.stage_replicas import StageReplicas, plan_replicas
from fxpart.program.replica_groups import compute_tied_bytes, explain_unsupported_ties
from fxpart.report.explanation_text import explain

pytestmark = pytest.mark.slow

STEPS, ROWS, WIDE = 4, 32, 24


class Tied(nn.Module):
    """Its head is its table."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDE, sparse=sparse)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))
        self.head = nn.Linear(WIDE, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def model(sparse: bool = False) -> Tied:
    torch.manual_seed(0)
    return Tied(sparse)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 9, (ROWS,), generator=draw), torch.randint(
        0, 9, (ROWS,), generator=draw
    )


@cache
def plan(counts: tuple[int, ...], sparse: bool = False) -> Plan:
    """So many copies of each stage: the table and a layer, three layers, the head."""
    chain = compiled(
        len(counts), model(sparse), optimizer=sgd if sparse else adamw, ranks=sum(counts)
    ).plan
    rows = {row.stage: row for row in chain.prediction.ranks}
    groups, first = [], 0
    for stage, count in enumerate(counts):
        devices = tuple(range(first, first + count))
        groups.append(StageReplicas(devices, tuple(range(count)), (rows[stage],) * count))
        first += count
    return plan_replicas(chain, groups, 0.0) if first > len(counts) else chain


def compiled(stages: int, net: nn.Module | None = None, **asked: Any) -> fxpart.Program:
    ranks = asked.pop("ranks", stages)
    return fxpart.compile(
        net or model(), f"local:{ranks}", example_inputs=batch(), loss=nn.functional.cross_entropy,
        microbatches=4, optimizer=asked.pop("optimizer", adamw), **{
            "constraints": {
                "mesh": "none", "stages": stages, "granularity": "op", "schedule": "1f1b",
            },
            **asked,
        },
    )  # fmt: skip


def trainer(
    counts: tuple[int, ...], optimizer: Any = adamw, sparse: bool = False, **options: Any
) -> Any:
    given = plan(counts, sparse)
    made = fxpart.compile(
        model(sparse), given.cluster, plan=given, example_inputs=batch(),
        loss=nn.functional.cross_entropy, optimizer=optimizer,
    )  # fmt: skip
    return made.trainer(optimizer, routing="queue", **options)


@cache
def alone(
    clip: float | None = None, optimizer: Any = adamw
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same steps without fxpart."""
    net = model()
    made, losses = optimizer(net.parameters()), []
    for step in range(STEPS):
        ids, y = batch(step)
        made.zero_grad()
        loss = nn.functional.cross_entropy(net(ids), y)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        made.step()
        losses.append(loss.item())
    return losses, {name: t.detach().clone() for name, t in net.state_dict().items()}


def check(made: Any, losses: list[float], wanted: Any) -> None:
    """The numbers of one process, and what is held twice has the same bits."""
    assert losses == pytest.approx(wanted[0], rel=1e-5)
    found = made.state_dict()
    assert found.keys() == wanted[1].keys()
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    same_bits(made)


def same_bits(made: Any) -> None:
    held: dict[str, list[torch.Tensor]] = {}
    for stage, worker in made.pipeline._workers.items():
        for state in made.spec.stages[stage].state:
            if state.requires_grad:
                own = made.parts.state.entries[state.name].copies[stage, 0]
                assert any(own is each for each in worker._parameters.all)
                held.setdefault(state.name, []).append(own)
    assert any(len(each) > 1 for each in held.values())
    assert all(torch.equal(each[0], other) for each in held.values() for other in each[1:])


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_numbers_of_one_process(counts: tuple[int, ...], clip: float | None) -> None:
    assert [tie.stages for tie in plan(counts).ties] == [(0, counts[0] + counts[1])]
    optimizer = adamw if clip is None else sgd  # whose steps are as long as what is clipped
    made = trainer(counts, optimizer, clip_norm=clip)
    losses = [float(made.step(batch(step))) for step in range(STEPS)]
    check(made, losses, alone(clip, optimizer))
    made.close()


@pytest.mark.parametrize("after", range(1, 24, 4))
@pytest.mark.parametrize("copy", [0, 2, 4])
def test_a_copy_that_ends_in_the_midst(after: int, copy: int) -> None:
    """After so many computations of the second step; other groups sum again."""
    made = trainer((2, 2, 2))
    losses = [float(made.step(batch(0)))]
    done, turns = 0, {}

    def turn(own: Any) -> Any:
        def counted() -> bool:
            nonlocal done
            moved = own()
            done += moved
            if done >= after and copy in made.pipeline._workers:
                made.pipeline.lose(copy)
            return moved

        return counted

    for stage, worker in made.pipeline._workers.items():
        turns[stage] = worker.turn = turn(worker.turn)
    losses += [float(made.step(batch(step))) for step in range(1, STEPS)]
    assert made.report() and (copy in made.pipeline._workers) == (done < after)
    check(made, losses, alone())
    made.close()


@pytest.mark.parametrize("weights", ["stash", "naive", "spectrain-v2", "pipeoptim"])
@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 2)])
def test_updates_that_are_missed(counts: tuple[int, ...], weights: str) -> None:
    made = trainer(counts, staleness=2, weight_mode=weights)
    for step in range(3 * STEPS):
        made.step(batch(step % STEPS))
    losses = [float(loss) for loss in made.drain()]
    assert losses and all(0 < loss < 3 for loss in losses)
    assert 1 <= max(each.staleness for each in made.report()) <= 2
    same_bits(made)
    made.close()


def test_stale_gradients_are_those_of_the_weights_that_were_read() -> None:
    """With stash: of what is held twice each holder's part with the version that it read."""
    made = trainer((1, 1, 1), sgd, staleness=2)
    read: dict[tuple[int, int, int], int] = {}  # (group, minibatch, microbatch): version
    for worker in made.pipeline._workers.values():

        def forward(
            number: int, microbatch: int, worker: Any = worker, own: Any = worker._run_forward
        ) -> Any:
            read[worker._group, number, microbatch] = worker.weights.updates
            return own(number, microbatch)

        worker._run_forward = forward
    for step in range(STEPS):
        made.step(batch(step))
    made.drain()
    assert any(version < key[1] for key, version in read.items()), "some are stale"
    found = made.state_dict()
    group = {state.name: stage.index for stage in made.spec.stages for state in stage.state}
    versions = [{n: p.detach().clone() for n, p in model().named_parameters()}]
    for step in range(STEPS):
        total = {name: torch.zeros_like(v) for name, v in versions[-1].items()}
        for m, (ids, y) in enumerate(zip(*(t.tensor_split(4) for t in batch(step)), strict=True)):
            parts = [
                {n: v.clone().requires_grad_() for n, v in versions[read[g, step, m]].items()}
                for g in range(3)
            ]
            x = nn.functional.embedding(ids, parts[0]["table.weight"])
            for k in range(4):
                name = f"layers.{k}"
                mine = parts[group[f"{name}.weight"]]
                x = torch.tanh(
                    nn.functional.linear(x, mine[f"{name}.weight"], mine[f"{name}.bias"])
                )
            out = nn.functional.linear(x, parts[2]["table.weight"])
            (nn.functional.cross_entropy(out, y) * len(ids) / ROWS).backward()
            for name, value in total.items():
                for part in parts:
                    if (gradient := part[name].grad) is not None:
                        value += gradient
        versions.append({n: v - 0.1 * total[n] for n, v in versions[-1].items()})
    for name, value in versions[-1].items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    made.close()


def test_planned_with_queues() -> None:
    program = compiled(
        3, mode="queue", constraints={
            "stages": 3, "granularity": "op", "copies": "always", "ranks": 4, "staleness": "1",
        }, ranks=4,
    )  # fmt: skip
    given = program.plan
    assert given.ties and given.replicas and not given.problems()
    assert "routed by queues" in explain(given)
    made = program.trainer(adamw)
    losses = [made.step(batch(step)) for step in range(STEPS)] + made.drain()
    assert next(loss for loss in losses if loss is not None) == pytest.approx(alone()[0][0])
    same_bits(made)
    made.close()


@pytest.mark.parametrize("counts", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("staleness", [0, 2])
def test_no_copy_holds_more_than_is_planned(
    counts: tuple[int, ...], staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tables' gradients among the head's: its own, both copies' of the table, and a sum."""
    table, first = 4 * 9 * WIDE, counts[0]
    shared = compute_tied_bytes(trainer(counts).spec)
    assert shared[first + 1] == (first * table, table) and shared[0] == (table, table)
    seen = []
    for seed in range(4):
        with monkeypatch.context() as patch:
            made = trainer(counts, staleness=staleness)
            seen.append(Most(made, batch, seed, patch).of)
            made.close()
    rows = {row.stage: row for row in plan(counts).prediction.ranks}
    for stage in seen[0]:
        was, copies = rows[stage], first if stage < first else 1
        row = queued_row(
            was, staleness, copies, "stash", taken=4, alone=False, shared=shared.get(stage, (0, 0))
        )
        plain = queued_row(was, staleness, copies, "stash", taken=4, alone=False)
        others = sum(shared.get(stage, (0, 0))) if copies == 1 else shared[stage][0]
        most = max(of[stage]["summing"] for of in seen)
        whole = was.memory.gradients
        assert most <= row.memory.gradients + others + (copies * whole if copies > 1 else 0)
        if stage in shared:
            assert not staleness or most > whole, "gradients of others were there"
            assert row.memory.sums - plain.memory.sums == (others if staleness else 0)
            assert row.update > plain.update or not was.update
        else:
            assert row == plain


class Twice(nn.Module):
    """A table with sparse gradients that is looked up on both sides of what takes long."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, WIDE, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(8))
        self.head = nn.Linear(WIDE, 9)

    def forward(self, ids: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x + self.table(others))


def test_sparse_gradients_are_refused() -> None:
    ids, y = batch()

    def made(**asked: Any) -> fxpart.Program:
        return fxpart.compile(
            Twice(), "local:4", example_inputs=(ids, ids, y), loss=nn.functional.cross_entropy,
            optimizer=sgd, constraints={"stages": 4, "granularity": "op", "mesh": "none"}, **asked,
        )  # fmt: skip

    why = r"tied parameters with sparse gradients \(table"
    with pytest.raises(FxpartError, match=why):
        made(mode="queue")
    with pytest.raises(FxpartError, match=why):
        made().trainer(sgd, routing="queue")


def test_a_holder_without_a_backward_is_refused() -> None:
    spec = compiled(3).spec
    first = spec.stages[0]
    outputs = tuple(msgspec.structs.replace(v, requires_grad=False) for v in first.outputs)
    still = msgspec.structs.replace(first, outputs=outputs)
    spec = msgspec.structs.replace(spec, stages=(still, *spec.stages[1:]))
    assert explain_unsupported_ties(spec) == [
        "tied parameters on a stage without a backward (table.weight)"
    ]


def test_a_lookup_with_sparse_gradients_and_a_head() -> None:
    """The sum is dense, as in one process."""
    made = trainer((1, 1, 2), sgd, sparse=True)
    losses = [float(made.step(batch(step))) for step in range(STEPS)]
    check(made, losses, alone(None, sgd))
    made.close()


def _trained(text: str) -> tuple[list[float], dict[str, Any]]:
    given = Plan.loads(text)
    made = fxpart.compile(
        model(), given.cluster, plan=given, example_inputs=batch(),
        loss=nn.functional.cross_entropy, optimizer=adamw,
    ).trainer(adamw, routing="queue")  # fmt: skip
    losses = [float(made.step(batch(step))) for step in range(STEPS)]
    state = {name: value.tolist() for name, value in made.state_dict().items()}
    made.close()
    return losses, state


def test_over_gloo(pool: Pool) -> None:
    wanted, state = alone()
    for losses, found in pool.run(_trained, plan((2, 1, 1)).dumps(), ranks=4):
        assert losses == pytest.approx(wanted, rel=1e-5)
        for name, value in state.items():
            torch.testing.assert_close(torch.tensor(found[name]), value, rtol=1e-4, atol=1e-5)
