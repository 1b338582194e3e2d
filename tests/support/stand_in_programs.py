"""Training on the stand-in accelerator beside the CPU: ``python stand_in_programs.py NAME...``.

Prints one JSON line per program: what the device gave, what the CPU gave, or the error. The device
exists once per process and changes torch for all of it, hence a process of its own.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stand_in
import torch
from stand_in_models import ROWS, Words, batches, loss
from torch import nn

import fxpart

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
STAGES = {"mesh": "none", "stages": 2}


def compiled(kind: str, constraints: dict[str, Any] | None = None, **options: Any) -> Any:
    """Compile for two ranks of the device ("gpu") or CPUs ("cpu"), by default as two stages."""
    torch.manual_seed(0)
    return fxpart.compile(
        Words(), "2xh100" if kind == "gpu" else "local:2", example_inputs=batches()[0], loss=loss,
        constraints=STAGES if constraints is None else constraints, seed=5, microbatches=2,
        **options,
    )  # fmt: skip


def state_of(trainer: Any) -> dict[str, Any]:
    """Return all weights and buffers."""
    return to_lists(trainer.state_dict())


def to_lists(given: Any) -> Any:
    """Return a structure with lists in place of tensors."""
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().float().flatten().tolist()
    if isinstance(given, dict):
        return {str(name): to_lists(value) for name, value in given.items()}
    return [to_lists(x) for x in given] if isinstance(given, (list, tuple)) else given


def check_place(trainer: Any, kind: str) -> None:
    """Check where every tensor of the trainer's stages and optimizers is."""
    wanted = stand_in.NAME if kind == "gpu" else "cpu"
    modules = [m for own in trainer.parts.mesh_ranks for m in own.modules.values()]
    held = [t for m in modules for t in [*m.parameters(), *m.buffers()]]
    assert held and {t.device.type for t in held} == {wanted}


def both(work: Callable[[str], Any]) -> dict[str, Any]:
    """Return what the work gives on the device and on the CPU."""
    return {"found": work("gpu"), "wanted": work("cpu")}


def run(program: Any, kind: str, optimizer: Any = SGD, **options: Any) -> Any:
    """Train on a few batches; return losses and weights."""
    trainer = program.trainer(optimizer, **options)
    check_place(trainer, kind)
    losses = [float(trainer.step(batch)) for batch in batches()]
    return [losses, state_of(trainer)]


@functools.cache
def on_cpu(optimizer: Any, options: str) -> Any:
    """Return what two stages on CPUs give."""
    return run(compiled("cpu"), "cpu", optimizer, **json.loads(options))


def training(
    constraints: dict[str, Any] | None = None, optimizer: Any = SGD, mode: str | None = None,
    options: dict[str, Any] | None = None, **arithmetic: Any,
) -> Callable[[], dict[str, Any]]:  # fmt: skip
    """Return a program that trains on the device; losses and weights are those of the CPU."""
    arithmetic = dict(arithmetic)

    def work() -> dict[str, Any]:
        found = run(
            compiled("gpu", constraints, **({"mode": mode} if mode else {})),
            "gpu",
            optimizer,
            **(options or {}),
        )
        return {"found": found, "wanted": on_cpu(optimizer, json.dumps(arithmetic))}

    return work


def in_bfloat16() -> dict[str, Any]:
    """Autocast: its conversions are those of CUDA, so that the CPU's losses are near."""

    def work(kind: str) -> Any:
        return run(compiled(kind, precision="bf16"), kind)[0]

    return {**both(work), "tolerance": 1e-2}


def asynchronous(mode: str) -> Callable[[], dict[str, Any]]:
    """Return a program that trains an asynchronous pipeline on both."""

    def work(kind: str) -> Any:
        trainer = compiled(kind, mode="async").trainer(SGD, weight_mode=mode)
        check_place(trainer, kind)
        for batch in batches() * 2:
            trainer.step(batch)
        losses = [float(x) for _, x in trainer.finish()]
        return [losses, state_of(trainer)]

    return lambda: both(work)


def offloaded() -> dict[str, Any]:
    """Memory of the device: no optimizer state, and few activations of microbatches in flight."""
    found = []
    for offload in ("none", "both"):
        program = compiled("gpu", {**STAGES, "schedule": "gpipe"})
        gc.collect()
        begin = stand_in.memory.now
        trainer = program.trainer(ADAM, offload=offload)
        trainer.step(batches()[0])
        trainer.zero_grad()
        resident, stand_in.memory.peak = stand_in.memory.now, 0
        trainer.step(batches()[1])
        found.append((resident - begin, stand_in.memory.peak - resident))
        states = [s for each in trainer.optimizers.by_place.values() for s in each.state.values()]
        places = {t.device.type for s in states for t in s.values()}
        assert places == {"cpu" if offload == "both" else stand_in.NAME}, places
        size = sum(t.nbytes for t in trainer.state_dict().values())
    (plain, before), (small, after) = found
    sys.stderr.write(f"bytes resident, and of a step: {found}; weights {size}\n")
    return {"found": [plain - small >= 2 * size, after < 0.7 * before], "wanted": [True, True]}


def checkpointed(**options: Any) -> dict[str, Any]:
    """Continue from a checkpoint that was written while training went on; also on the CPU."""
    folder = Path(tempfile.mkdtemp())
    programs = {kind: compiled(kind) for kind in ("gpu", "cpu")}
    first = programs["gpu"].trainer(ADAM, **options)
    first.fit(batches()[:2], checkpoints=folder, progress=False)
    generated = torch.randn(3, device=stand_in.NAME).tolist()
    saved = state_of(first)
    rest = [[float(first.step(b)) for b in batches()], state_of(first)]
    found = []
    for kind in ("gpu", "cpu"):
        other = programs[kind].trainer(ADAM, **options)
        other.load_checkpoint(folder)
        check_place(other, kind)
        again = torch.randn(3, device=stand_in.NAME).tolist()
        found += [state_of(other), again, [float(other.step(b)) for b in batches()]]
        found.append(state_of(other))
    return {"found": found, "wanted": [saved, generated, *rest] * 2}


def staged() -> dict[str, Any]:
    """What a checkpoint holds that is copied without blocking, while the next step changes it."""
    from fxpart.runtime.checkpointing.snapshot import StagingBuffers, take_snapshot

    trainer = compiled("gpu").trainer(ADAM)
    trainer.step(batches()[0])
    copies = stand_in.host.copies
    blocking = take_snapshot(trainer)
    late = take_snapshot(trainer, StagingBuffers())
    assert stand_in.host.copies > copies
    trainer.step(batches()[1])
    held = [[bytes(p.data) for p in s.pieces[0]] for s in (blocking, late)]
    return {"found": [held[0] == held[1]], "wanted": [True]}


def moved() -> dict[str, Any]:
    """Weights and optimizer state from the device to the CPU, and from there to the device."""
    trainers = [compiled(kind).trainer(ADAM) for kind in ("gpu", "cpu", "gpu")]
    for batch in batches():
        trainers[0].step(batch)
    for before, after in pairwise(trainers):
        after.load_state_dict(before.state_dict())
        after.load_optimizer_state_dict(before.optimizer_state_dict())
    states = [to_lists([t.state_dict(), t.optimizer_state_dict()["state"]]) for t in trainers]
    return {"found": states[1:], "wanted": [states[0]] * 2}


def evaluated() -> dict[str, Any]:
    """Metrics, predictions, tokens, gradients, and statistics of gradients and activations."""

    def accuracy(output: torch.Tensor, batch: Any) -> torch.Tensor:
        return (output.argmax(-1).cpu() == batch[1]).float().mean()

    def work(kind: str) -> Any:
        trainer = compiled(kind).trainer(SGD, log_grad_norm=True)
        trainer.log_gradient_statistics = True
        trainer.step(batches()[0])
        norm = float(trainer.last_grad_norm)
        trainer.backward(batches()[1])
        gradients = to_lists(trainer.gradients())
        trainer.update()
        outputs = to_lists(trainer.predict((batches()[1][0],)))
        values = trainer.evaluate(batches(), {"accuracy": accuracy})
        tokens = to_lists(trainer.generate(batches()[0][0][:3, :2], max_new_tokens=4))
        found = trainer.last_gradient_statistics, trainer.activation_statistics(batches()[0])
        statistics = [{name: vars(each) for name, each in part.items()} for part in found]
        return [norm, gradients, outputs, values, tokens, statistics]

    return both(work)


def fitted() -> dict[str, Any]:
    """A loop with accumulation, a scheduler and evaluations."""

    def work(kind: str) -> Any:
        trainer = compiled(kind).trainer(SGD, clip_norm=0.5)
        seen: list[float] = []
        trainer.fit(
            batches(), epochs=2, accumulate=2, evaluate=batches(), progress=False,
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
            callbacks=[lambda info: seen.append(float(info.loss))],
        )  # fmt: skip
        return [seen, state_of(trainer)]

    return both(work)


def exported() -> dict[str, Any]:
    """A program that was exported, with weights from a dict."""
    from fxpart.training.trainer_factory import load_trainer

    def work(kind: str) -> Any:
        program = compiled(kind)
        with tempfile.TemporaryDirectory() as folder:
            program.export(Path(folder) / "program")
            weights = dict(program.captured.state)
            trainer = load_trainer(Path(folder) / "program", SGD, weights=weights)
            check_place(trainer, kind)
            return [float(trainer.step(b)) for b in batches()]

    return both(work)


def recorded() -> dict[str, Any]:
    """A recording: the device's memory, whose least is that of weights and optimizer state."""
    trainer = compiled("gpu").trainer(ADAM)
    trainer.step(batches()[0])
    held = stand_in.memory.now
    with trainer.record() as recorder:
        trainer.step(batches()[1])
    found = recorder.recording
    peaks = [memory.peak for memory in found.memory]
    bounds = held < max(peaks) <= stand_in.memory.peak
    return {"found": [bounds, found.setting["devices"] == stand_in.NAME], "wanted": [True, True]}


def profiled() -> dict[str, Any]:
    """Ops and stages timed by the device's events, and their memory by its allocator."""
    from fxpart.capture.workload import Workload
    from fxpart.profiling import op_arguments
    from fxpart.profiling.session import profile

    # torch makes no generator for a device that is registered in Python.
    own = SimpleNamespace(**vars(torch))
    own.Generator = lambda device: torch.Generator()
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(op_arguments, "torch", own):
        work = Workload(Words(), batches()[0], loss, batch_size=ROWS)
        made = profile(work, "2xh100", Path(folder) / "profile", budget=6.0, microbatches=2)
    return {"found": [made.ops > 0, made.stages > 0], "wanted": [True, True]}


def waits() -> dict[str, Any]:
    """Reads of the device that block the host, in a step with clipping."""
    trainer = compiled("gpu").trainer(ADAM, clip_norm=0.1)
    trainer.step(batches()[0])
    before = stand_in.host.waits
    trainer.step(batches()[1])
    return {"found": [stand_in.host.waits - before], "wanted": [1]}


def mixed() -> dict[str, Any]:
    """A stage that holds a tensor on the CPU fails, as on CUDA."""
    trainer = compiled("gpu").trainer(SGD)
    (module, *_) = [m for own in trainer.parts.mesh_ranks for m in own.modules.values()]
    named = [n for n, _ in module.named_parameters()]
    owner, _, leaf = named[-1].rpartition(".")
    inside = module.get_submodule(owner)
    inside._parameters[leaf] = nn.Parameter(inside._parameters[leaf].detach().cpu())
    try:
        trainer.step(batches()[0])
    except Exception as problem:
        return {"found": ["same device" in str(problem)], "wanted": [True]}
    return {"found": ["no error"], "wanted": [True]}


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "1f1b": training(options={"clip_norm": 0.1}, clip_norm=0.1),
    "fused adam": training(optimizer=ADAM),
    "adafactor": training(optimizer=functools.partial(torch.optim.Adafactor, lr=1e-2)),
    "gpipe": training(
        {**STAGES, "schedule": "gpipe"}, options={"clip_value": 1e-3}, clip_value=1e-3
    ),
    "zb-h1": training({**STAGES, "schedule": "zb-h1"}),
    "recompute": training(options={"recompute": "full"}),
    "recompute selectively": training(options={"recompute": "selective"}),
    "offload": training(optimizer=ADAM, options={"offload": "both"}),
    "offload recomputed": training(options={"offload": "both", "recompute": "full"}),
    "offload split": training({**STAGES, "schedule": "zb-h1"}, options={"offload": "activations"}),
    "offload zero 1": training({"mesh": "dp=2", "zero": 1}, options={"offload": "both"}),
    "offload zero 3": training(
        {"mesh": "dp=2", "zero": 3}, options={"offload": "both", "clip_norm": 0.1}, clip_norm=0.1
    ),
    "offloaded memory": offloaded,
    "offload checkpoint": functools.partial(checkpointed, offload="both"),
    "dp": training({"mesh": "dp=2"}, options={"clip_norm": 0.1}, clip_norm=0.1),
    "zero 1": training({"mesh": "dp=2", "zero": 1}),
    "zero 3": training({"mesh": "dp=2", "zero": 3}, options={"clip_norm": 0.1}, clip_norm=0.1),
    "tp": training({"mesh": "tp=2"}),
    "queue": training({}, mode="queue"),
    "bf16": in_bfloat16,
    "stash": asynchronous("stash"),
    "spectrain": asynchronous("spectrain"),
    "checkpoint": checkpointed,
    "staged": staged,
    "moved": moved,
    "evaluation": evaluated,
    "fit": fitted,
    "export": exported,
    "record": recorded,
    "profile": profiled,
    "waits": waits,
    "mixed": mixed,
}


def main(names: list[str]) -> None:
    """Run the programs and print their rows."""
    import fxpart.runtime.batch.device_copy as device_copy
    import fxpart.runtime.checkpointing.snapshot as snapshot
    import fxpart.runtime.executor.activation_offload as activation_offload
    import fxpart.runtime.optimizer.host_parameters as host_parameters

    torch.set_num_threads(1)
    stand_in.register()
    for module in (device_copy, snapshot, activation_offload, host_parameters):
        module.allocate_pinned = stand_in.pin  # type: ignore[attr-defined]
    for name in names or PROGRAMS:
        begin = time.perf_counter()
        try:
            row = PROGRAMS[name]()
        except Exception:
            row = {"error": traceback.format_exc()}
        row["seconds"] = round(time.perf_counter() - begin, 2)
        sys.stdout.write("ROW " + json.dumps({"name": name, **row}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
