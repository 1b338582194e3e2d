"""``fxpart train``: the first minute of training, in this process or on several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fxpart.cli import output
from fxpart.cli.options import CommandLineRequest, compile_options, json_option
from fxpart.cli.queue_options import (
    on_command_line,
    print_replica_counts,
    queue_options,
    queued_of,
)
from fxpart.cli.resumable_run import (
    bounds_of,
    fit,
    on_ranks,
    parse_run_options,
    run_options,
    with_run_plan,
)
from fxpart.cli.trace_options import (
    TraceRequest,
    asked_trace,
    bare_bytes,
    check_traced,
    make_data_ended_error,
)
from fxpart.schedule.spec import SCHEDULES
from fxpart.schedule.weight_modes import MODES, weight_mode

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.capture.workload import Workload
    from fxpart.plan.model import Plan


@click.command()
@compile_options
@click.option("--plan", type=click.Path(), help="Use this plan instead of choosing one.")
@click.option("--nproc", "-n", metavar="N", help="Processes to start here, or MIN:MAX.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True)
@run_options
@click.option("--lr", type=float, help="The optimizer's learning rate, if not its default.")
@click.option("--clip-norm", type=float, help="Largest global gradient norm.")
@click.option(
    "--load", type=click.Path(),
    help="Start from a safetensors file or checkpoint folder; --weights takes it too.",
)  # fmt: skip
@click.option("--save", type=click.Path(), help="Write the trained weights into this folder.")
@click.option(
    "--compile", "compile_stages", is_flag=True, help="Compile each stage by torch.compile."
)
@queue_options
@click.option("--pin", is_flag=True, help="Give each rank of this host cores of its own.")
@click.option("--trace", type=click.Path(), help="Measure the last steps, for Perfetto and report.")
@click.option("--trace-steps", type=click.IntRange(1, 1000), default=5, show_default=True)
@json_option
def command(
    nproc: str | None,
    steps: int,
    lr: float | None,
    clip_norm: float | None,
    load: str | None,
    weights: str | None,
    save: str | None,
    trace: str | None,
    trace_steps: int,
    as_json: bool,
    **options: Any,
) -> int:
    """Train TARGET by a plan and print the loss of each step.

    With --nproc N, N processes are started; without it all ranks run in this one. With --run DIR,
    the run is saved there, and the same command goes on with it until it has --steps steps; ranks
    that are lost start again, and --nproc may be MIN:MAX (fxpart/docs/checkpoints_and_failures.md).
    Batches come from the Workload's data; without data, the example batch is repeated. With
    --trace FILE, what each rank does in the last --trace-steps steps is measured and written to
    FILE, its medians to FILE.summary.json; `fxpart report PLAN --measured FILE` compares. With
    --save DIR, the weights are written as a safetensors checkpoint that from_pretrained reads. An
    asynchronous plan's losses are known a few steps later, and the last ones when it has drained.
    With --routing queue, or a plan made with --mode queue, whichever copy of a stage is free takes
    the next microbatch, and with --nproc a process that ends is missed by nobody while its stage
    has another; with --run, too, the same command goes on.
    """
    from fxpart.environment import read_launch

    queued, weights = queued_of(options, weights, trace)
    kept = parse_run_options(options, traced=trace is not None)
    how: dict[str, Any] = {name: bool(options.pop(name)) for name in ("compile_stages", "pin")}
    if weights is not None and weights not in MODES and options["mode"] in (None, "sync"):
        load, weights = load or weights, None
    request = CommandLineRequest(**options, weights=weights)
    started = read_launch()
    asked = None if trace is None else asked_trace(trace, trace_steps, steps)
    bounds = None if nproc is None else bounds_of(nproc, kept)
    if started is None and bounds is not None and (bounds.most > 1 or kept is not None):
        more: dict[str, object] = {"--steps": steps, "--lr": lr, "--load": load, "--save": save}
        more |= {"--clip-norm": clip_norm, "--pin": how["pin"], "--compile": how["compile_stages"]}
        more |= on_command_line(queued)
        if asked is not None:
            more |= {"--trace": asked.path, "--trace-steps": asked.steps}
        return on_ranks(request, bounds, kept, more, steps, as_json)
    if kept is not None:
        request = with_run_plan(request, kept, started)
    workload = request.workload()
    program = request.compile(workload, quiet=started is not None)
    if asked is not None:
        check_traced(program.plan)
    before = None if asked is None else bare_bytes()
    optimizer = _optimizer(request, workload, lr)
    trainer = program.trainer(
        optimizer, clip_norm=clip_norm, weights=load, **how, **queued,
        **_watching(program.plan, steps),
    )  # fmt: skip
    first = started is None or started.rank == 0
    if first:
        _note(trainer, workload, pinned=how["pin"])
    if kept is not None:
        data = workload.data if workload.data is not None else [_example(program)]
        if not fit(trainer, data, kept, steps, first=first, as_json=as_json):
            save = None  # the same command goes on, and writes it then
    else:
        run = _TrainingLoop(trainer, _batches(workload, program), request.target, first, as_json)
        _traced(run, steps, asked, before, program.plan)
        run.finish()
    tell_stages(trainer, first=first, as_json=as_json)
    if save is not None:
        _save(trainer, save, first)
    trainer.close()
    return 0


def _note(trainer: Any, workload: Workload, *, pinned: bool) -> None:
    """What is other than it was asked for."""
    if pinned and trainer.pinned.why:
        output.note(f"not pinned: {trainer.pinned.why}")
    if workload.data is None:
        output.note("no data in the target: the example batch is repeated")


def _save(trainer: Any, folder: str, first: bool) -> None:
    files = trainer.save_pretrained(folder)
    if first:
        output.note(f"wrote {', '.join(file.name for file in files)} into {folder}")


def _traced(
    run: _TrainingLoop, steps: int, asked: TraceRequest | None, before: int | None, plan: Plan
) -> None:
    """All steps, the last ones measured where that was asked for."""
    if asked is None:
        run.steps(1, steps)
        return
    warm = steps - asked.steps
    run.steps(1, warm)
    with run.trainer.record(baseline=before) as recorder:
        run.steps(warm + 1, steps)
    if run.done <= warm:
        raise make_data_ended_error(run.done)
    if run.first:
        asked.write(recorder.recording, plan, run.as_json)


@dataclass
class _TrainingLoop:
    """The steps, and how far they have come. first: whether this process is the one that tells.

    trainer: a synchronous or an asynchronous one. seconds: by call of the latter, of minibatches
    whose loss is not known yet, (step, how long the call took).
    """

    trainer: Any
    batches: Iterator[Any]
    target: str
    first: bool
    as_json: bool
    done: int = 0
    ended: bool = False
    seconds: dict[int, tuple[int, float]] = field(default_factory=dict)

    def steps(self, start: int, stop: int) -> None:
        """Steps ``start`` to ``stop``, the first being 1, or until the data ends."""
        for step in range(start, stop + 1):
            batch = None if self.ended else _next(self.batches, self.target)
            if batch is None:
                if self.first and not self.ended:
                    output.note(f"the data ended after {step - 1} steps")
                self.ended = True
                return
            before = time.perf_counter()
            call = self.trainer.submit(batch) if self.streams else 0
            loss = 0.0 if self.streams else float(self.trainer.step(batch))
            seconds = time.perf_counter() - before
            self.done = step
            if not self.streams:
                self._tell(step, loss, seconds)
                continue
            self.seconds[call] = step, seconds
            self._tell_known(self.trainer.pop_losses())

    def finish(self) -> None:
        """Drain an asynchronous trainer, and tell the losses that are known then."""
        if self.streams:
            self._tell_known(self.trainer.finish())

    @property
    def streams(self) -> bool:
        """Whether losses are known later than their steps."""
        return is_stream(self.trainer)

    def _tell_known(self, losses: list[tuple[int, Any]]) -> None:
        for call, loss in losses:
            step, seconds = self.seconds.pop(call)
            self._tell(step, float(loss), seconds)

    def _tell(self, step: int, loss: float, seconds: float) -> None:
        if self.first and self.as_json:
            output.line({"step": step, "loss": loss, "seconds": seconds})
        elif self.first:
            output.text(f"step {step:>4}  loss {loss:.6f}  {seconds:.3f} s")


def is_stream(trainer: Any) -> bool:
    """Whether it is an asynchronous trainer."""
    from fxpart.runtime.asynchronous import AsyncTrainer
    from fxpart.runtime.queues.trainer import QueueTrainer

    return isinstance(trainer, AsyncTrainer | QueueTrainer)


def tell_stages(trainer: Any, *, first: bool, as_json: bool) -> None:
    """Of an asynchronous trainer: what its stages missed and held. Every rank calls it."""
    if not is_stream(trainer) or print_replica_counts(trainer, first=first, as_json=as_json):
        return
    from fxpart.runtime.asynchronous.stage_report import describe_inaccurate_predictions

    stages = trainer.report()
    if not first:
        return
    if as_json:
        output.line({"stages": msgspec.to_builtins(stages)})
        return
    rhos = [stage.mean_rho for stage in stages]
    for stage, rho in zip(stages, rhos, strict=True):
        text = f"stage {stage.stage}: forwards missed {_several(stage.staleness, 'update')}"
        text += f", {_several(stage.copies, 'set')} of weights at most"
        text += f", {_several(stage.skipped, 'update')} left out" if stage.skipped else ""
        output.note(text if rho is None else f"{text}, rho {rho:.2f}")
    if describe_inaccurate_predictions(rhos):
        output.note(f"warning: {describe_inaccurate_predictions(rhos)}")


def _watching(plan: Plan, steps: int) -> dict[str, Any]:
    """Measure some predictions, where the plan's weights are predicted."""
    predicts = not SCHEDULES[plan.schedule].flushes and weight_mode(plan.weights).predicts
    return {"watch": max(1, steps // 20)} if predicts else {}


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _optimizer(request: CommandLineRequest, workload: Workload, lr: float | None) -> Any:
    """What the trainer takes: None for what was compiled, or the same with this rate."""
    if lr is None:
        return None
    from fxpart.compat.optimizer_choice import choose

    make: Any = choose(request.optimizer or workload.optimizer or "adamw").make
    return partial(make, lr=lr)


def _batches(workload: Workload, program: Program) -> Iterator[Any]:
    """The workload's data again and again, or the example batch brought to the global size."""
    if workload.data is None:
        batch = _example(program)
        while True:
            yield batch
    while True:
        found = False
        for batch in workload.batches() or ():
            found = True
            yield batch
        if not found:
            return


def _example(program: Program) -> Any:
    """A batch of the global size."""
    assert program.captured.example is not None, "a captured model has its example"
    return program.captured.example()


def _next(batches: Iterator[Any], target: str) -> Any:
    from fxpart.capture.workload import make_user_error
    from fxpart.errors import FxpartError

    try:
        return next(batches, None)
    except FxpartError:
        raise
    except Exception as fault:
        raise make_user_error(fault, None, target, "while the data was read") from fault
