"""ZeRO-1, -2 and -3: the numbers of one process, and what each rank holds, counted in bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hand_lanes import SHAPES, Last, Whole, batch, trainer
from lane_programs import assert_close, one_process, train
from ranks import Pool

from fxpart.collectives import redistribution
from fxpart.errors import FxpartError
from fxpart.runtime import InProcess, Trainer
from fxpart.runtime.executor.stage_signature import SavedTensorPolicy
from fxpart.runtime.gradients import reduce_scatter
from fxpart.runtime.optimizer.optimizer_shards import OptimizerShards

KINDS: list[tuple[str, dict[str, Any]]] = [
    (mesh, options)
    for mesh in ("dp=2", "dp=3", "tp=2,dp=2")
    for options in ({"zero": 1}, {"zero": 2}, {"zero3": True}, {"zero": 2, "zero3": True})
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), KINDS)
def test_zero_trains_like_one_process(mesh: str, options: dict[str, Any]) -> None:
    """Uneven pieces too: 7 rows, 6 and 10 columns, one number, on two and on three mesh ranks."""
    for mine, expected in zip(train(mesh, options), one_process(), strict=True):
        assert_close(mine, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"zero": 1}, {"zero": 2, "offload": "optimizer"}, {"zero3": True, "offload": "both"}],
)
def test_gloo_zero_trains_like_one_process(pool: Pool, options: dict[str, Any]) -> None:
    for found in pool.run(train, "dp=2", options, ranks=4):
        for mine, expected in zip(found, one_process(), strict=True):
            assert_close(mine, expected)


@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 2, "offload": "both"}])
def test_gradients_accumulate_over_batches(options: dict[str, Any]) -> None:
    made, whole = trainer(InProcess(4), "dp=2", **options), Whole()
    for seed in range(3):
        made.backward(batch(seed=seed))
        whole.backward(batch(seed=seed))
        assert_close(made.gradients(), {n: p.grad for n, p in whole.p.items()})
    made.update()
    whole.update()
    assert_close(made.gradients(), whole.gradients)
    assert_close(made.state_dict(), whole.state())
    made.step(batch(seed=9))
    whole.step(batch(seed=9))
    assert_close(made.state_dict(), whole.state())


def held_bytes(made: Trainer, mesh_rank: int) -> tuple[int, int]:
    """What a mesh rank holds between microbatches and updates: (optimizer state, gradients)."""
    assert made.optimizer is not None
    state = gradients = 0
    for entry in made.parts.state.entries.values():
        for (_, at), parameter in entry.copies.items():
            if at == mesh_rank:
                held = made.parts.shards.of(parameter)
                for value in made.optimizer.state.get(held, {}).values():
                    state += value.nbytes if value.dim() else 0
                for tensor in {id(parameter): parameter, id(held): held}.values():
                    if tensor.grad is not None:
                        gradients += tensor.grad.untyped_storage().nbytes()
    return state, gradients


def whole_bytes() -> int:
    """Of the parameters that a mesh rank's two stages hold, without the number that is never
    cut."""
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES.values() if shape)
    return 4 * (numbers + torch.Size(SHAPES["embed.weight"]).numel())


@pytest.mark.parametrize("mesh_ranks", [2, 3])
def test_zero_1_holds_a_part_of_the_optimizer(mesh_ranks: int) -> None:
    made = trainer(InProcess(2 * mesh_ranks), f"dp={mesh_ranks}", zero=1)
    plain = trainer(InProcess(2 * mesh_ranks), f"dp={mesh_ranks}")
    for each in (made, plain):
        each.step(batch(12))
    states = [held_bytes(made, mesh_rank)[0] for mesh_rank in range(mesh_ranks)]
    assert sum(states) == 2 * whole_bytes()
    assert held_bytes(plain, 0)[0] == 2 * whole_bytes()
    most = -(-whole_bytes() // mesh_ranks) + 4 * mesh_ranks * len(SHAPES)
    assert max(states) <= 2 * most


@pytest.mark.parametrize("mesh_ranks", [2, 3])
def test_zero_2_accumulates_a_part_of_the_gradients(mesh_ranks: int) -> None:
    """The owners' gradients; a copy of a tie has none until the update."""
    made = trainer(InProcess(2 * mesh_ranks), f"dp={mesh_ranks}", zero=2)
    plain = trainer(InProcess(2 * mesh_ranks), f"dp={mesh_ranks}", zero=1)
    for each in (made, plain):
        each.backward(batch(12))
        each.backward(batch(12))
    owned = 4 * (sum(torch.Size(shape).numel() for shape in SHAPES.values()))
    scale = 4 * (mesh_ranks - 1)
    held = [held_bytes(made, mesh_rank)[1] for mesh_rank in range(mesh_ranks)]
    # Pieces of one bucket share its memory, so that it is counted once for each.
    shards, parameters = made.parts.shards, [p for _, p in made.parts.state.parameters()]
    parts = [shards.of(p).grad for p in parameters]
    assert sum(p.nbytes for p in parts if p is not None) == owned + scale
    assert all(p.grad is None or shards.of(p) is p for p in parameters), "no whole gradient is left"
    assert held_bytes(plain, 0)[1] == owned
    assert max(held) > 0


def test_zero_2_sends_gradients_while_a_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With small buckets: at its end whole gradients are left of ties alone, and sums are right."""
    left: set[str] = set()
    after = OptimizerShards.after_backward

    def look(self: OptimizerShards, mesh_rank: int, stage: int) -> None:
        for name, entry in self._state.entries.items():
            found = entry.copies.get((stage, mesh_rank))
            if found is not None and found.grad is not None:
                left.add(name)
        after(self, mesh_rank, stage)

    monkeypatch.setattr(reduce_scatter, "BUCKET", 1)
    monkeypatch.setattr(OptimizerShards, "after_backward", look)
    for mine, expected in zip(train("dp=2", {"zero": 2}), one_process(), strict=True):
        assert_close(mine, expected)
    assert left == {"embed.weight", "scale"}, "the number without dims is not cut"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"zero": 2}])
def test_buckets_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    found = []
    for size in (1, 100, 1 << 20):
        monkeypatch.setattr(reduce_scatter, "BUCKET", size)
        found.append(train("dp=2,tp=2", options))
    assert found[0] == found[1] == found[2]


def test_a_piece_is_a_view_of_its_parameter() -> None:
    made = trainer(InProcess(4), "dp=2", zero=1)
    for _, parameter in made.parts.state.parameters():
        held = made.parts.shards.of(parameter)
        assert held.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


ELEMENTWISE = [
    partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.optim.Adam, torch.optim.AdamW,
    torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda k: getattr(k, "__name__", "SGD"))
@pytest.mark.parametrize("options", [{"mesh": "tp=2"}, {"mesh": "dp=3", "zero": 1}])
def test_elementwise_optimizers_run_on_parts(kind: Any, options: dict[str, Any]) -> None:
    """Also state that an optimizer makes at once (Adagrad), and state that is one number."""
    mesh = options["mesh"]
    rest = {k: v for k, v in options.items() if k != "mesh"}
    mesh_ranks = int(mesh[-1])
    made = trainer(InProcess(2 * mesh_ranks), mesh, optimizer=kind, **rest)
    whole = Whole(kind)
    for seed in range(3):
        made.step(batch(12, seed=seed))
        whole.step(batch(12, seed=seed))
    if getattr(kind, "__name__", "") != "Rprop":  # which goes by signs: rounding turns them
        assert_close(made.state_dict(), whole.state())
    found = made.optimizer_state_dict()["state"]
    for name, parameter in whole.p.items():
        mine = whole.optimizer.state[parameter]
        assert found[name].keys() == mine.keys()
        for key, value in mine.items():
            if value is not None:
                assert torch.as_tensor(found[name][key]).shape == torch.as_tensor(value).shape
    again = trainer(InProcess(2 * mesh_ranks), mesh, optimizer=kind, **rest)
    again.load_state_dict(made.state_dict())
    again.load_optimizer_state_dict(made.optimizer_state_dict())
    for seed in (7, 8):
        assert torch.equal(made.step(batch(12, seed=seed)), again.step(batch(12, seed=seed)))


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.LBFGS])
@pytest.mark.parametrize("options", [{"mesh": "tp=2"}, {"mesh": "dp=2", "zero": 1}])
def test_an_optimizer_of_whole_matrices_is_refused(kind: Any, options: dict[str, Any]) -> None:
    mesh, zero = options["mesh"], options.get("zero", 0)
    with pytest.raises(FxpartError, match=f"FXP109(.|\n)*{kind.__name__}(.|\n)*a part of"):
        trainer(InProcess(4), mesh, optimizer=kind, zero=zero)


def test_replicas_take_any_optimizer() -> None:
    made, whole = trainer(InProcess(4), "dp=2", optimizer=torch.optim.Adafactor), None
    whole = Whole(torch.optim.Adafactor)
    for seed in range(3):
        made.step(batch(seed=seed))
        whole.step(batch(seed=seed))
    assert_close(made.state_dict(), whole.state())


def test_groups_of_parameters_are_made_by_their_own_shapes() -> None:
    """A factory that looks at dims sees the parameters, not the flat pieces."""

    def factory(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        matrices = [p for p in parameters if p.dim() > 1]
        others = [p for p in parameters if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        )

    made, whole = trainer(InProcess(4), "dp=2", optimizer=factory, zero=2), Whole(factory)
    for seed in range(2):
        made.step(batch(seed=seed))
        whole.step(batch(seed=seed))
    assert_close(made.state_dict(), whole.state())
    groups = made.optimizer_state_dict()["param_groups"]
    assert [group["params"] for group in groups] == [
        [n for n, s in SHAPES.items() if len(s) > 1], [n for n, s in SHAPES.items() if len(s) <= 1]
    ]  # fmt: skip


def alive_after_forward(monkeypatch: pytest.MonkeyPatch, *, regather: bool) -> tuple[int, int]:
    """Bytes of gathered parameters between forward and backward, and gathers in a step.

    Measured after the last stage's forward: its all-reduce needs both mesh ranks to be through with
    the stage before, and a backward there needs both to gather.
    """
    gathered: list[weakref.ref[torch.Tensor]] = []
    sizes: list[int] = []
    calls = [0]
    started = redistribution.start_gather

    def start_gather(*args: Any) -> Callable[[], torch.Tensor]:
        calls[0] += 1
        finish = started(*args)

        def finished() -> torch.Tensor:
            found = finish()
            gathered.append(weakref.ref(found.untyped_storage()))  # type: ignore[arg-type]
            return found

        return finished

    called = SavedTensorPolicy.call

    def call(self: SavedTensorPolicy, *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        if not regather:
            self.regather = None
        outputs = called(self, *args, **options)
        if isinstance(args[0], Last):
            gc.collect()
            alive = [ref() for ref in gathered]
            sizes.append(sum(s.nbytes() for s in alive if s is not None))  # type: ignore[attr-defined]
        return outputs

    monkeypatch.setattr(redistribution, "start_gather", start_gather)
    monkeypatch.setattr(SavedTensorPolicy, "call", call)
    made = trainer(InProcess(4), "dp=2", zero3=True, microbatches=1)
    made.step(batch())
    return max(sizes), calls[0]


@pytest.mark.slow
def test_zero_3_keeps_no_gathered_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between forward and backward only the mesh rank's parts stay; each is gathered once more."""
    with monkeypatch.context() as context:
        kept, once = alive_after_forward(context, regather=False)
    dropped, twice = alive_after_forward(monkeypatch, regather=True)
    whole = 4 * 2 * 10 * 6
    assert kept == 2 * whole, "two mesh ranks, up and down projection"
    assert dropped == 0
    assert twice == 2 * once == 8
