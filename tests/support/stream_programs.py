"""What rank processes and tests run of streams: each returns plain data to compare."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import asynchronous_models as models
import torch
from hand_stages import ADAMW, Hand, batch, language
from runtime_programs import Bits, Faulty, bits
from torch import nn
from torch.nn import functional

from fxpart.emulator import Emulator
from fxpart.errors import FxpartError
from fxpart.optim import BasisRotation
from fxpart.runtime import InProcess, StepInfo, Trainer, connect
from fxpart.runtime.transport.interface import Transport
from fxpart.schedule.weight_modes import MODES

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "nadam": partial(torch.optim.NAdam, lr=0.01)}

STEPS = 9


def make(hand: Hand, transport: Transport, optimizer: str = "sgd", **options: Any) -> Trainer:
    """A trainer of this process's stages, stage i on rank i; without ``weights`` a plain one."""
    modules = {i: stage for i, stage in enumerate(hand.stages) if i in transport.local}
    ranks = range(len(hand.stages))
    given = {"microbatches": 2, "optimizer": OPTIMIZERS[optimizer], **options}
    return Trainer(hand.spec(), modules, ranks=ranks, transport=transport, **given)


def losses_of(trainer: Trainer, batches: list[Any]) -> list[bytes]:
    """Of all batches, in order."""
    found = [trainer.step(each) for each in batches]
    found += trainer.drain() if trainer.is_asynchronous else []
    return [loss.numpy().tobytes() for loss in found if loss is not None]


def train(
    cut: tuple[int, ...], steps: int, model: dict[str, Any], options: dict[str, Any], here: bool
) -> tuple[list[bytes], Bits]:
    """Train :func:`hand_stages.language`, on ranks or (``here``) in this process."""
    transport = InProcess(len(cut)) if here else connect(len(cut))
    trainer = make(language(cut, **model), transport, **options)
    losses = losses_of(trainer, [batch(seed=seed) for seed in range(steps)])
    state = bits(trainer.state_dict())
    return losses, state


def compiled(
    model: str, stages: int, microbatches: int, runs: list[tuple[str, str]], here: bool
) -> list[str]:
    """Of a compiled MLP or GPT trained in each (mode, optimizer): a digest of losses and state.

    here: by the emulator, else on ranks.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loss: Any = functional.cross_entropy if model == "mlp" else models.gpt_loss
    batches: list[Any] = (models.mlp_batches if model == "mlp" else models.gpt_batches)(STEPS, 4)
    module = models.mlp(4) if model == "mlp" else models.Gpt(3)
    emulator = Emulator(
        module, stages=stages, microbatches=microbatches, loss=loss, example_inputs=batches[0]
    )
    found = []
    for mode, optimizer in runs:
        if here:
            result = emulator.run(batches, mode, OPTIMIZERS[optimizer], STEPS)
            losses, state = list(result.losses), result.state_dict
        else:
            how: dict[str, Any] = {} if MODES[mode].name == "flush" else {"guard": False}
            how |= {"total_updates": STEPS} if MODES[mode].discount else {}
            trainer = emulator.program.trainer(OPTIMIZERS[optimizer], weight_mode=mode, **how)
            heard = [trainer.step(each) for each in batches]
            heard += trainer.drain() if trainer.is_asynchronous else []
            losses = [float(loss) for loss in heard if loss is not None]
            state = trainer.state_dict()
            trainer.close()
        text = repr((losses, sorted(bits(state).items())))
        found.append(hashlib.sha256(text.encode()).hexdigest())
    return found


def rotated(
    starts: list[Any], samples: list[list[Any]], mode: str, options: dict[str, Any], here: bool
) -> tuple[list[float], list[Any]]:
    """A chain of matrices trained by basis rotation in double precision: losses and weights.

    starts: the first weights of each stage. samples: by minibatch, (input, target) of each
    microbatch.
    """
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()) for _ in starts]
    module, count = nn.Sequential(*layers).double(), len(samples[0])
    with torch.no_grad():
        for (linear, _), start in zip(layers, starts, strict=True):
            linear.weight.copy_(torch.tensor(start, dtype=torch.float64))
    batches = [
        tuple(torch.tensor(part, dtype=torch.float64) for part in zip(*mine, strict=True))
        for mine in samples
    ]
    example = torch.zeros(2 * count, 2).double(), torch.zeros(2 * count, 2).double()
    emulator = Emulator(
        module, stages=len(starts), microbatches=count, loss=half_distance, example_inputs=example
    )
    optimizer = partial(BasisRotation, **options)
    if here:
        result = emulator.run(batches, mode, optimizer, len(batches))
        losses, state = list(result.losses), dict(result.state_dict)
    else:
        trainer = emulator.program.trainer(optimizer, weight_mode=mode)
        heard = [*(trainer.step(each) for each in batches), *trainer.drain()]
        losses = [float(loss) for loss in heard if loss is not None]
        state = trainer.state_dict()
        trainer.close()
    return losses, [state[f"{k}.0.weight"].tolist() for k in range(len(starts))]


def half_distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half of the squared distance, on average over samples."""
    return (output - target).square().sum(1).mean() / 2


def fail(stages: int, stage: int, at: int, calls: int, here: bool) -> dict[str, Any]:
    """A forward of a stage raises; what each rank hears, and at which call."""
    hand = language((2, 2) if stages == 2 else (1, 1, 1, 1), tied=stages == 4)
    transport = InProcess(stages) if here else connect(stages)
    trainer = make(hand, transport, weights="stash", microbatches=1)
    if stage in transport.local:
        module = hand.stages[stage]
        module.forward = Faulty(trainer, module, "raise", at)  # type: ignore[arg-type, method-assign]
    for call in range(calls):
        try:
            trainer.step(batch(seed=call))
        except FxpartError as failure:
            again = ""
            try:
                trainer.step(batch())
            except FxpartError as later:
                again = later.code
            problems = [(p.code, p.where, p.why) for p in failure.problems]
            return {"call": call, "problems": problems, "again": again}
    return {}


def fit(stages: int, what: str, here: bool) -> dict[str, Any]:
    """A run with evaluations; ``what`` goes wrong in it on rank 1 (in process: there)."""
    hand = language((1, 1, 1, 1))
    transport = InProcess(stages) if here else connect(stages)
    trainer = make(
        hand, transport, weights="spectrain", microbatches=1,
        evaluation=lambda: (hand.spec(), {i: hand.stages[i] for i in transport.local}),
    )  # fmt: skip
    mine = here or transport.local[0] == 1
    seen: list[tuple[int, int, float]] = []

    def heard(info: StepInfo) -> None:
        seen.append((info.step, info.rows, info.loss))
        if what == "callback" and mine and info.step == 3:
            raise ValueError("a callback that cannot")

    def data() -> Any:
        for seed in range(8):
            if what == "data" and mine and seed == 5:
                raise ValueError("data that cannot be read")
            yield batch(seed=seed)

    try:
        done = trainer.fit(data, epochs=1, callbacks=[heard], evaluate=[batch(seed=99)], every=6)
    except FxpartError as failure:
        return {"code": failure.code, "why": failure.problems[0].why, "seen": len(seen)}
    return {"steps": done.steps, "why": done.why, "seen": seen, "values": dict(done.values)}


def bare(here: bool) -> list[tuple[list[bytes], Bits]]:
    """Two streams one after another, the second with a smaller last batch; not by shared memory."""
    transport = InProcess(4) if here else connect(4, shared_memory=False)
    found = []
    for mode, count in (("spectrain", 1), ("stash", 2)):
        trainer = make(language((1, 1, 1, 1)), transport, "adamw", weights=mode, microbatches=count)
        steps = [batch(seed=seed) for seed in range(5)]
        found.append((losses_of(trainer, steps), bits(trainer.state_dict())))
        found.append((losses_of(trainer, [*steps, batch(3, 5)]), bits(trainer.state_dict())))
    return found


def left(here: bool) -> list[tuple[int, Bits]]:
    """Two trainers one after another, each closed with minibatches in flight."""
    found = []
    for mode in ("spectrain", "stash"):
        transport = InProcess(4) if here else connect(4, shared_memory=False)
        trainer = make(language((1, 1, 1, 1)), transport, "adamw", weights=mode, microbatches=1)
        assert trainer.is_asynchronous
        for seed in range(5):
            trainer.step(batch(seed=seed))
        trainer.close()
        found.append((trainer.updates, bits(own(trainer))))
    return found


def own(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The parameters of this process by stage and name."""
    (mesh_rank,) = trainer.parts.mesh_ranks
    return {
        f"{stage}.{name}": parameter
        for stage, module in mesh_rank.modules.items()
        for name, parameter in module.named_parameters()
    }


def part(what: str) -> tuple[str, str]:
    """Rank 2 of four drains, or is gone, where the others train on; code and where."""
    transport = connect(4, timeout=3.0)
    trainer = make(language((1, 1, 1, 1)), transport, weights="stash", microbatches=1)
    assert trainer.is_asynchronous
    try:
        for call in range(12):
            if call == 6 and transport.local[0] == 2:
                if what == "gone":
                    transport.close()
                    return "", ""
                trainer.drain()
            trainer.step(batch(seed=call))
        trainer.drain()
    except FxpartError as failure:
        return failure.code, failure.problems[0].where
    return "", ""
