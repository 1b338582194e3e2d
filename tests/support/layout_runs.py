"""Train a random layout, and the module as written in one process, and compare the two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from layout_models import MODELS, Batch
from random_layouts import Layout, LayoutCase, draw_case
from torch import nn

import fxpart
from fxpart.api import Program
from fxpart.rng import microbatch_key
from fxpart.runtime.batch.mesh_rank_batch import get_row_multiple
from fxpart.training.trainer_factory import load_trainer
from fxpart.verification.single_process import keyed_random

# Of the difference of an update, relative to it. Models compute a loss, softmax and norms in
# float32 even in float64.
TOLERANCES = {"float64": 2e-6, "float32": 1e-3, "bf16": 0.1}
# Where a mixture computes in float32, the last bit may route a token to another expert.
ROUTED = 0.03
FACTORIES: dict[str, Any] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, eps=1e-3),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, eps=1e-3, momentum=0.5),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, eps=1e-3, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-2, eps=1e-3),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0, eps=1e-4),
}
GROUPS = ({"params": ["*.weight"], "weight_decay": 0.1, "lr": 5e-3}, {"weight_decay": 0.0})


@dataclass(frozen=True)
class LayoutRun:
    """What a run has computed.

    losses: of all batches. evaluated: of evaluations. norms: of gradients before clipping. state:
    the final one, and the averages of its parameters as "average/NAME".
    """

    losses: list[float]
    evaluated: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]


@lru_cache(maxsize=6)
def compiled(
    model: str, layers: int, dtype: str, dropout: bool, frozen: tuple[str, ...], length: int,
    rows: int, uneven: bool,
) -> tuple[nn.Module, Program]:  # fmt: skip
    """The model, and its program for one rank."""
    spec = MODELS[model]
    made = spec.build(layers, dropout, get_dtype(dtype), frozen, uneven)
    batch = cast(spec.batch(rows, length, torch.Generator().manual_seed(1)), get_dtype(dtype))
    program = fxpart.compile(
        made, "local:1", example_inputs=batch, loss=spec.loss, check="off", microbatches=1,
        precision="bf16" if dtype == "bf16" else None,
        constraints={"mesh": "none", "stages": 1},
        optimizer=FACTORIES["sgd"] if spec.sparse else None,
    )  # fmt: skip
    return made, program


def compile_case(case: LayoutCase) -> tuple[nn.Module, Program]:
    """The model of a case, and its program for one rank."""
    return compiled(
        case.model, case.layers, case.dtype, case.dropout, case.frozen, case.length,
        case.compiled_rows, case.uneven,
    )  # fmt: skip


def get_dtype(name: str) -> torch.dtype:
    """The dtype of parameters."""
    return torch.float64 if name == "float64" else torch.float32


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its numbers in the dtype."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(batch, dict):
        return {name: one(tensor) for name, tensor in batch.items()}
    return tuple(one(tensor) for tensor in batch)


def batches_of(case: LayoutCase) -> list[list[Batch]]:
    """The batches of each update."""
    generator = torch.Generator().manual_seed(case.number)
    spec, dtype = MODELS[case.model], get_dtype(case.dtype)
    return [
        [
            cast(spec.batch(count, (case.lengths or [case.length] * 3)[step], generator), dtype)
            for count in counts
        ]
        for step, counts in enumerate(case.rows)
    ]


def plan_layout(program: Program, layout: Layout) -> Program:
    """Plan the captured model for the layout."""
    return program.replan(
        f"local:{layout.devices}", microbatches=layout.microbatches, constraints=layout.constraints
    )


def apply_plan(case: LayoutCase, model: nn.Module, text: str) -> Program:
    """The program of a plan from its text."""
    spec, dtype = MODELS[case.model], get_dtype(case.dtype)
    example = spec.batch(case.compiled_rows, case.length, torch.Generator().manual_seed(1))
    return fxpart.compile(
        model, example_inputs=cast(example, dtype), loss=spec.loss, check="off",
        plan=fxpart.Plan.loads(text), optimizer=FACTORIES["sgd"] if spec.sparse else None,
    )  # fmt: skip


def train_on_ranks(number: int, dtype: str, plans: dict[str, str], folder: str) -> bytes:
    """On every rank of the pool: the case's run; what it has computed on rank 0, else nothing."""
    torch.set_num_threads(1)
    case = draw_case(number, dtype, ranks=4)
    model = MODELS[case.model].build(
        case.layers, case.dropout, get_dtype(case.dtype), case.frozen, case.uneven
    )
    programs = {name: apply_plan(case, model, text) for name, text in plans.items()}
    run = train_layouts(case, model, programs, batches_of(case), Path(folder))
    if torch.distributed.get_rank():
        return b""
    numbers = {"losses": run.losses, "evaluated": run.evaluated, "norms": run.norms}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in numbers.items()}
    state = {f"state/{name}": tensor.contiguous().clone() for name, tensor in run.state.items()}
    return safetensors.torch.save({**tensors, **state})


def read_run(data: bytes) -> LayoutRun:
    """What rank 0 has sent."""
    tensors = safetensors.torch.load(data)
    known = {name: tensors[name].tolist() for name in ("losses", "evaluated", "norms")}
    state = {n.partition("/")[2]: t for n, t in tensors.items() if n.startswith("state/")}
    return LayoutRun(**known, state=state)


def train_layouts(
    case: LayoutCase,
    model: nn.Module,
    programs: dict[str, Program],
    batches: list[list[Batch]],
    folder: Path,
) -> LayoutRun:
    """Train under the layouts, of which the second continues a checkpoint of the first."""
    trainer = make_trainer(case, model, programs["layout"], case.layout, folder)
    losses: list[float] = []
    evaluated: list[float] = []
    norms: list[float] = []
    frozen = choose_frozen(case, model)
    try:
        for step, parts in enumerate(batches):
            if step == 1 and case.moved is not None:
                trainer.save_checkpoint(folder / "checkpoint")
                trainer.close()
                trainer = make_trainer(case, model, programs["moved"], case.moved, folder)
                trainer.load_checkpoint(folder / "checkpoint")
            if step == 1:
                for parameter in frozen:
                    parameter.requires_grad_(False)
            if "rates" in case.extras and step == 2:
                for group in trainer.optimizer.param_groups:
                    group["lr"] *= 0.5
            for index, batch in enumerate(parts):
                if "gradients" in case.extras and index + 1 == len(parts):
                    losses.append(float(trainer.backward(batch)))
                    trainer.gradients()
                    trainer.update()
                    continue
                losses.append(float(trainer.step(batch, accumulate=index + 1 < len(parts))))
            if "clip_norm" in case.clip:
                norms.append(float(trainer.last_grad_norm))
            if case.evaluates and step == 0 and "export" not in case.extras:
                evaluated.append(float(trainer.eval_step(parts[0])))
        state = trainer.state_dict()
        if "ema" in case.extras:
            state |= {f"average/{n}": t for n, t in trainer.ema_state_dict().items()}
        return LayoutRun(losses, evaluated, norms, state)
    finally:
        trainer.close()
        for parameter in frozen:
            parameter.requires_grad_(True)


def choose_frozen(case: LayoutCase, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are frozen after the first update: every third."""
    if "freeze" not in case.extras or "export" in case.extras:
        return []
    return [p for p in model.parameters() if p.requires_grad][::3]


def make_trainer(
    case: LayoutCase, model: nn.Module, program: Program, layout: Layout, folder: Path
) -> Any:
    """A trainer of the program with the options of the case."""
    options: dict[str, Any] = dict(case.clip)
    if layout.recompute is not None:
        options["recompute"] = {
            k: mode for k, mode in layout.recompute.items() if k < len(program.spec.stages)
        }
    if case.decays:
        options["groups"] = GROUPS
    if "ema" in case.extras:
        options["ema"] = 0.9
    if "ahead" in case.extras:
        options["gather_ahead"] = 2
    if "reapply" in case.extras:
        program = apply_plan(case, model, program.plan.dumps())
    if "export" in case.extras:
        target = folder / ("moved" if layout is case.moved else "layout")
        program.export(target)
        state = {name: tensor.detach() for name, tensor in program.captured.state.items()}
        return load_trainer(target, FACTORIES[case.optimizer], weights=state, **options)
    return program.trainer(FACTORIES[case.optimizer], **options)


def train_plain(
    case: LayoutCase, model: nn.Module, programs: Sequence[Program], batches: list[list[Batch]]
) -> LayoutRun:
    """Train the module as written. programs: of each update, for how their batches are split."""
    initial = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    given: Any = [p for _, p in named]
    if case.decays:
        heavy = [p for name, p in named if name.endswith(".weight")]
        light = [p for name, p in named if not name.endswith(".weight")]
        given = [
            {"params": heavy, "weight_decay": 0.1, "lr": 5e-3},
            {"params": light, "weight_decay": 0.0},
        ]
    optimizer = FACTORIES[case.optimizer](given)
    losses: list[float] = []
    evaluated: list[float] = []
    norms: list[float] = []
    frozen = choose_frozen(case, model)
    average = {name: tensor.detach().clone() for name, tensor in named}
    calls = 0
    try:
        for step, parts in enumerate(batches):
            if step == 1:
                for parameter in frozen:
                    parameter.requires_grad_(False)
            if "rates" in case.extras and step == 2:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
            weight = MODELS[case.model].weight
            total = sum(weight(batch) for batch in parts)
            for batch in parts:
                loss = 0.0
                for key, part in split(case, programs[step], batch, calls):
                    if weight(part) == 0:
                        continue
                    with keyed_random(key) if case.dropout else nullcontext():
                        found = _loss(case, model, part)
                    (found * (weight(part) / total)).backward()
                    loss += float(found.detach()) * weight(part) / weight(batch)
                losses.append(loss)
                calls += 1
            if "clip_norm" in case.clip:
                known = [p for _, p in named]
                norms.append(float(nn.utils.clip_grad_norm_(known, case.clip["clip_norm"])))
            if "clip_value" in case.clip:
                nn.utils.clip_grad_value_([p for _, p in named], case.clip["clip_value"])
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in named:
                average[name].lerp_(parameter.detach(), 0.1 if step else 1.0)
            if case.evaluates and step == 0 and "export" not in case.extras:
                model.eval()
                with torch.no_grad():
                    evaluated.append(float(_loss(case, model, parts[0])))
                model.train()
        state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        if "ema" in case.extras:
            state |= {f"average/{name}": tensor for name, tensor in average.items()}
        return LayoutRun(losses, evaluated, norms, state)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)
        model.load_state_dict(initial)
        model.zero_grad()
        model.train()


def split(
    case: LayoutCase, program: Program, batch: Batch, call: int
) -> Iterator[tuple[int, Batch]]:
    """Yield the key and the rows of each microbatch; the whole batch where nothing is drawn."""
    if not case.dropout and case.dtype != "bf16":
        yield 0, batch
        return
    multiple = get_row_multiple(program.spec)
    rows = len(batch[0] if isinstance(batch, tuple) else next(iter(batch.values())))
    shares = rows // multiple
    count = min(program.plan.microbatches, shares)
    base, extra = divmod(shares, count)
    start = 0
    for index in range(count):
        stop = start + (base + (index < extra)) * multiple
        key = microbatch_key(program.plan.seed, call, index)
        cut = slice(start, stop)
        yield (
            key,
            (
                {name: tensor[cut] for name, tensor in batch.items()}
                if isinstance(batch, dict)
                else tuple(tensor[cut] for tensor in batch)
            ),
        )
        start = stop


def _loss(case: LayoutCase, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of the module as written."""
    spec = MODELS[case.model]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "bf16"):
        if spec.loss is None:
            found: torch.Tensor = model(**batch).loss
            return found
        if isinstance(batch, tuple):
            return spec.loss(model(*batch[:-1]), batch[-1])
        inputs = {name: tensor for name, tensor in batch.items() if name != "target"}
        return spec.loss(model(**inputs), batch["target"])


def difference(case: LayoutCase, initial: nn.Module, one: LayoutRun, other: LayoutRun) -> str:
    """Return "" where both runs are equal within the tolerance, else the largest differences."""
    tolerance = TOLERANCES[case.dtype]
    if MODELS[case.model].experts and case.dtype != "float64":
        tolerance = max(tolerance, ROUTED)
    start = dict(initial.state_dict())
    found: list[tuple[float, str]] = []
    for kind in ("losses", "evaluated", "norms"):
        for index, (a, b) in enumerate(zip(getattr(one, kind), getattr(other, kind), strict=True)):
            found.append((_relative(abs(a - b), abs(b)), f"{kind}[{index}] {a} {b}"))
    start |= {n: start[n.partition("/")[2]] for n in other.state if n.startswith("average/")}
    moves = {n: (other.state[n] - start[n]).double().norm() for n in start}
    size = sum(t.numel() for t in start.values())
    mean = float(torch.stack(list(moves.values())).norm()) / size**0.5
    for name, before in start.items():
        if name not in one.state:
            found.append((float("inf"), f"{name} is missing"))
            continue
        apart = float((one.state[name] - other.state[name]).double().norm())
        least = 0.03 * mean * before.numel() ** 0.5
        found.append((_relative(apart, max(float(moves[name]), least)), name))
    wrong = sorted((entry for entry in found if not entry[0] <= tolerance), reverse=True)
    return "; ".join(f"{name}: {value:.1e}" for value, name in wrong[:4])


def _relative(apart: float, scale: float) -> float:
    return apart / scale if scale else apart
