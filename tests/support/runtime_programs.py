"""What rank processes run for the runtime's tests: each returns plain data to compare."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from hand_stages import ADAMW, Hand, batch, branches, language

from fxpart.errors import FxpartError
from fxpart.runtime import Checkpoints, EarlyStopping, Trainer, connect
from fxpart.runtime.transport.interface import PeerLostError, Transport

Bits = dict[str, bytes]


def bits(tensors: dict[str, torch.Tensor]) -> Bits:
    """Tensors as bytes, so that equality is equality of bits."""
    return {name: t.detach().contiguous().numpy().tobytes() for name, t in tensors.items()}


def make(hand: Hand, transport: Transport, **options: Any) -> Trainer:
    """A trainer of this process's stages, stage i on rank i unless ``ranks`` says otherwise."""
    given: dict[str, Any] = {"microbatches": 4, "optimizer": ADAMW, **options}
    ranks = given.setdefault("ranks", range(len(hand.stages)))
    modules = {i: stage for i, stage in enumerate(hand.stages) if ranks[i] in transport.local}
    return Trainer(hand.spec(), modules, transport=transport, **given)


def train(
    cut: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    options: dict[str, Any],
    model: dict[str, Any],
) -> tuple[list[bytes], Bits, bytes]:
    """Train :func:`hand_stages.language`, on ranks or in process; losses, state, last norm."""
    trainer = make(language(cut, **model), connect(len(cut)), **options)
    losses = []
    for seed, (rows, length) in enumerate(shapes):
        losses.append(trainer.step(batch(rows, length, seed)).numpy().tobytes())
    norm = trainer.last_grad_norm
    state = bits(trainer.state_dict())
    return losses, state, b"" if norm is None else norm.numpy().tobytes()


def world() -> tuple[int, int]:
    """Rank and number of ranks."""
    return dist.get_rank(), dist.get_world_size()


class Faulty:
    """Wraps a stage's forward: raises, sleeps or ends the process at one microbatch of one call."""

    def __init__(self, trainer: Trainer, stage: torch.nn.Module, what: str, at: int) -> None:
        self.trainer, self.inner, self.what, self.at = trainer, stage.forward, what, at
        self.count = 0

    def __call__(self, key: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count += 1
        outputs = self.inner(key, *inputs)
        if self.count != self.at:
            return outputs
        if self.what == "raise":
            raise ValueError("a stage that cannot")
        if self.what == "shape":
            return tuple(o[:, :-1] for o in outputs)
        if self.what == "backward":
            return tuple(_RaiseInBackward.apply(o) for o in outputs)
        if self.what == "sleep":
            time.sleep(6)
            return outputs
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class _RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("a stage that cannot go back")


def fail(
    stages: int, stage: int, what: str, at: int, timeout: float, shared_memory: bool = True
) -> dict[str, Any]:
    """One step with a fault on one stage, then, where that can be, one good step."""
    hand = language((1,) * stages) if stages == 4 else language((2, 2))
    transport = connect(stages, timeout=timeout, shared_memory=shared_memory)
    assert getattr(transport, "shares_memory", shared_memory) == shared_memory
    trainer = make(hand, transport)
    if stage in transport.local:
        module = hand.stages[stage]
        module.forward = Faulty(trainer, module, what, at)  # type: ignore[method-assign]
    before = trainer.state_dict()
    start = time.monotonic()
    problems: list[Any] = []
    try:
        trainer.step(batch())
    except FxpartError as failure:
        problems = [(p.code, p.where, p.why) for p in failure.problems]
    seconds = time.monotonic() - start
    found = {"problems": problems, "seconds": seconds}
    if what in ("raise", "backward", "shape"):
        names = [n for n in before if "running" not in n]
        after = trainer.state_dict()
        found["unchanged"] = all(torch.equal(before[n], after[n]) for n in names)
        found["gradients"] = len(trainer.gradients())
        found["next"] = trainer.step(batch()).numpy().tobytes()
    else:
        try:
            trainer.step(batch())
        except FxpartError as failure:
            found["again"] = failure.problems[0].code
    return found


def mismatch(kinds: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """A step for which each rank has its own kind of batch; the problems."""
    transport = connect(len(kinds))
    trainer = make(language((1,) * 4 if len(kinds) == 4 else (2, 2)), transport)
    given = batch()
    kind = kinds[transport.local[0]]
    if kind == "missing":
        del given["labels"]
    elif kind == "dtype":
        given["mask"] = given["mask"].double()
    elif kind == "rows":
        given = batch(rows=6)
    try:
        trainer.step(given)
    except FxpartError as failure:
        trainer.step(batch())  # nothing was sent: the next step is as good as ever
        return [(p.code, p.where, p.why) for p in failure.problems]
    return []


def other_options(root: str) -> list[str]:
    """Ranks that disagree about options of the trainer or of fit; the errors."""
    transport, found = connect(2), []
    own = transport.local[0]
    of_trainer: list[dict[str, Any]] = [{"seed": own}, {"sed": 0} if own else {}]
    of_fit: list[dict[str, Any]] = [
        {"steps": own},
        {"step": 1} if own else {},
        {"evaluate": [batch()], "early_stopping": EarlyStopping(patience=1 + own)},
        {"checkpoints": Checkpoints(f"{root}/run-{own}")},
        {"scheduler": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5 + own)},
    ]
    for given in of_trainer:
        try:
            make(language((2, 2)), transport, **given)
        except FxpartError as failure:
            found.append(str(failure))
    trainer = make(language((2, 2)), transport)
    for given in of_fit:
        try:
            trainer.fit([batch()], **given)
        except FxpartError as failure:
            found.append(str(failure))
    return found


def wrong_world(ranks: int) -> str:
    """A plan for another number of ranks than there are."""
    try:
        connect(ranks)
    except FxpartError as failure:
        return str(failure)
    return ""


def save(cut: tuple[int, ...], first_only: bool) -> tuple[Bits, dict[str, Any]]:
    """Two steps, then model and optimizer state."""
    trainer = make(language(cut), connect(len(cut)))
    for seed in range(2):
        trainer.step(batch(seed=seed))
    optimizer = trainer.optimizer_state_dict(first_only=first_only)
    state = bits(trainer.state_dict(first_only=first_only))
    return state, {
        name: {key: value.numpy().tobytes() for key, value in slots.items()}
        for name, slots in optimizer.get("state", {}).items()
    }


def move(cut: tuple[int, ...], saved: dict[str, Any] | None) -> dict[str, Any]:
    """Train and save, or load what was saved; then the losses of two more steps."""
    trainer = make(language(cut), connect(len(cut)))
    if saved is None:
        for seed in range(2):
            trainer.step(batch(seed=seed))
    else:
        trainer.load_state_dict({n: torch.tensor(v) for n, v in saved["model"].items()})
        state = {
            n: {k: torch.tensor(v) for k, v in slots.items()}
            for n, slots in saved["optimizer"]["state"].items()
        }
        trainer.load_optimizer_state_dict({**saved["optimizer"], "state": state})
        trainer.calls = saved["calls"]
    optimizer = trainer.optimizer_state_dict()
    state = {
        n: {k: v.tolist() for k, v in slots.items()} for n, slots in optimizer["state"].items()
    }
    found: dict[str, Any] = {
        "model": {n: v.tolist() for n, v in trainer.state_dict().items()},
        "optimizer": {"state": state, "param_groups": optimizer["param_groups"]},
        "calls": trainer.calls,
    }
    after = [trainer.step(batch(seed=seed)).numpy().tobytes() for seed in (5, 6)]
    return {"saved": found, "after": after}


def evaluate(cut: tuple[int, ...]) -> tuple[list[bytes], list[bytes]]:
    """Evaluation before each of three training steps: both kinds of loss."""
    hand, transport = language(cut), connect(len(cut))
    other = language(cut)
    local = {i: s for i, s in enumerate(hand.stages) if i in transport.local}

    def evaluation() -> tuple[Any, dict[int, torch.nn.Module]]:
        spec = other.spec()
        for index, stage in local.items():
            mine = other.stages[index].eval()
            for attribute in stage.names:
                setattr(mine, attribute, getattr(stage, attribute))
        return spec, {i: other.stages[i] for i in local}

    trainer = make(hand, transport, evaluation=evaluation)
    found, losses = [], []
    for seed in range(3):
        found.append(trainer.eval_step(batch(6, 4, 9)).numpy().tobytes())
        losses.append(trainer.step(batch(seed=seed)).numpy().tobytes())
    return found, losses


def train_branches(schedule: str) -> tuple[list[bytes], Bits]:
    """Three steps of two branches that share a matrix, of more microbatches than any window."""
    trainer = make(branches(), connect(4), schedule=schedule, clip_norm=0.1, microbatches=16)
    losses = [trainer.step(batch(20, seed=seed)).numpy().tobytes() for seed in range(3)]
    return losses, bits(trainer.state_dict())


def train_placed(schedule: str, ranks: tuple[int, ...], microbatches: int) -> tuple[Any, Bits]:
    """Two steps of the tied language model with its four stages on these ranks."""
    transport = connect(max(ranks) + 1)
    trainer = make(
        language(), transport, schedule=schedule, ranks=ranks, microbatches=microbatches,
        clip_norm=0.1,
    )  # fmt: skip
    losses = [trainer.step(batch(2 * microbatches, seed=s)).numpy().tobytes() for s in range(2)]
    return losses, bits(trainer.state_dict())


def out_of_step(number: int) -> str:
    """Rank 0 exchanges a message while rank 1 tells a number; what rank 0 makes of it."""
    transport = connect(2, timeout=5.0)
    if transport.local[0]:
        transport.exchange([number])
        return ""
    try:
        transport.exchange_bytes(b"what went wrong")
    except PeerLostError as failure:
        return str(failure)
    return "nothing"
