"""``fxpart train``: train a target, in this process or on several."""

from __future__ import annotations

import math
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
    parse_queue_options,
    print_replica_counts,
    queue_options,
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
    check_traced,
    make_data_ended_error,
    make_trace_request,
    measure_baseline_bytes,
)
from fxpart.schedule.spec import SCHEDULES
from fxpart.schedule.weight_modes import MODES, weight_mode

if TYPE_CHECKING:
    from fxpart.api import Program
    from fxpart.capture.workload import Workload
    from fxpart.plan.model import Plan

# Of options that are on or off: the trainer's name, and the command line's.
_FLAGS = {"compile_stages": "--compile", "cuda_graphs": "--cuda-graphs", "pin": "--pin"}


@click.command()
@compile_options
@click.option("--plan", type=click.Path(), help="Use this plan instead of choosing one.")
@click.option("--nproc", "-n", metavar="N", help="Number of processes to start here, or MIN:MAX.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True)
@run_options
@click.option("--lr", type=float, help="Learning rate, by default the optimizer's.")
@click.option("--clip-norm", type=float, help="Maximum global gradient norm.")
@click.option(
    "--load", type=click.Path(),
    help="Initial weights: a safetensors file or checkpoint folder; also --weights.",
)  # fmt: skip
@click.option("--save", type=click.Path(), help="Write the trained weights into this folder.")
@click.option(
    "--compile", "compile_stages", is_flag=True, help="Compile each stage with torch.compile."
)
@click.option("--cuda-graphs", is_flag=True, help="Record each stage's kernels and replay them.")
@queue_options
@click.option("--pin", is_flag=True, help="Pin each rank to its own cores.")
@click.option("--trace", type=click.Path(), help="Record the last steps, for Perfetto and report.")
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

    With --nproc N, N processes are started; without it, all ranks run in this process. With --run
    DIR, the run is saved there, and the same command resumes it until it has --steps steps; lost
    ranks are restarted, and --nproc may be MIN:MAX (fxpart/docs/checkpoints_and_failures.md).

    Batches are those of the Workload's data; without data, the example batch is repeated. With
    --trace FILE, the actions of each rank in the last --trace-steps steps are recorded in FILE, and
    their medians in FILE.summary.json; `fxpart report PLAN --measured FILE` compares them with the
    plan. With --save DIR, the weights are written as a safetensors checkpoint for from_pretrained.

    Losses of an asynchronous plan are known a few steps later, and the last ones after the final
    flush. With --routing queue, or a plan made with --mode queue, the first free replica of a stage
    takes the next microbatch; with --nproc, training continues without a failed process as long as
    its stage has another replica. With --run, the same command resumes this, too.
    """
    from fxpart.environment import read_launch

    queue_settings, weights = parse_queue_options(options, weights, trace)
    kept = parse_run_options(options, traced=trace is not None)
    flags: dict[str, Any] = {name: bool(options.pop(name)) for name in _FLAGS}
    if weights is not None and weights not in MODES and options["mode"] in (None, "sync"):
        load, weights = load or weights, None
    request = CommandLineRequest(**options, weights=weights)
    started = read_launch()
    trace_request = None if trace is None else make_trace_request(trace, trace_steps, steps)
    bounds = None if nproc is None else bounds_of(nproc, kept)
    if started is None and bounds is not None and (bounds.most > 1 or kept is not None):
        more: dict[str, object] = {"--steps": steps, "--lr": lr, "--load": load, "--save": save}
        more |= {option: flags[name] for name, option in _FLAGS.items()}
        more["--clip-norm"] = clip_norm
        more |= on_command_line(queue_settings)
        if trace_request is not None:
            more |= {"--trace": trace_request.path, "--trace-steps": trace_request.steps}
        return on_ranks(request, bounds, kept, more, steps, as_json)
    if kept is not None:
        request = with_run_plan(request, kept, started)
    workload = request.workload()
    program = request.compile(workload, quiet=started is not None)
    if trace_request is not None:
        check_traced(program.plan)
    before = None if trace_request is None else measure_baseline_bytes()
    optimizer = _optimizer(request, workload, lr)
    trainer = program.trainer(
        optimizer, clip_norm=clip_norm, weights=load, **flags, **queue_settings,
        **_watching(program.plan, steps),
    )  # fmt: skip
    first, status = started is None or started.rank == 0, 0
    if first:
        _note(trainer, workload, pinned=flags["pin"])
    if kept is not None:
        data = workload.data if workload.data is not None else [_example(program)]
        done, status = fit(trainer, data, kept, steps, first=first, as_json=as_json)
        save = save if done else None  # The same command resumes the run and writes it then.
    else:
        run = _TrainingLoop(trainer, _batches(workload, program), request.target, first, as_json)
        _run_steps(run, steps, trace_request, before, program.plan)
        run.finish()
    print_stages(trainer, first=first, as_json=as_json)
    if save is not None:
        _save(trainer, save, first)
    trainer.close()
    return status


def _note(trainer: Any, workload: Workload, *, pinned: bool) -> None:
    """Print notes on options without effect."""
    if pinned and trainer.pinned.why:
        output.note(f"not pinned: {trainer.pinned.why}")
    if workload.data is None:
        output.note("no data in the target: the example batch is repeated")


def _save(trainer: Any, folder: str, first: bool) -> None:
    files = trainer.save_pretrained(folder)
    if first:
        output.note(f"wrote {', '.join(file.name for file in files)} into {folder}")


def _run_steps(
    run: _TrainingLoop,
    steps: int,
    trace_request: TraceRequest | None,
    before: int | None,
    plan: Plan,
) -> None:
    """Run all steps, and record the last ones if requested."""
    if trace_request is None:
        run.steps(1, steps)
        return
    warm = steps - trace_request.steps
    run.steps(1, warm)
    with run.trainer.record(baseline=before) as recorder:
        run.steps(warm + 1, steps)
    if run.done <= warm:
        raise make_data_ended_error(run.done)
    if run.first:
        trace_request.write(recorder.recording, plan, run.as_json)


@dataclass
class _TrainingLoop:
    """The training loop. first: whether this process prints.

    finite: whether the last loss was. seconds: by call, (step, duration) of minibatches whose loss
    is not known yet.
    """

    trainer: Any
    batches: Iterator[Any]
    target: str
    first: bool
    as_json: bool
    done: int = 0
    ended: bool = False
    finite: bool = True
    seconds: dict[int, tuple[int, float]] = field(default_factory=dict)

    def steps(self, start: int, stop: int) -> None:
        """Run steps ``start`` to ``stop``, counted from 1, or until the data end."""
        for step in range(start, stop + 1):
            batch = None if self.ended else _next(self.batches, self.target)
            if batch is None:
                if self.first and not self.ended:
                    output.note(f"the data ended after {step - 1} steps")
                self.ended = True
                return
            before = time.perf_counter()
            call = self.trainer.submit(batch)
            known = [(number, float(loss)) for number, loss in self.trainer.pop_losses()]
            self.seconds[call] = step, time.perf_counter() - before
            self.done = step
            self._print_known(known)

    def finish(self) -> None:
        """Flush the pipeline, and print the remaining losses."""
        if self.trainer.is_asynchronous:
            self._print_known([(call, float(loss)) for call, loss in self.trainer.finish()])

    def _print_known(self, losses: list[tuple[int, float]]) -> None:
        for call, loss in losses:
            step, seconds = self.seconds.pop(call)
            self._print_step(step, loss, seconds)

    def _print_step(self, step: int, loss: float, seconds: float) -> None:
        if self.first and self.finite and not math.isfinite(loss):
            from fxpart.runtime.monitor.nonfinite_guard import describe_nonfinite_loss

            output.note(f"warning: {describe_nonfinite_loss(step, loss)}")
        self.finite = math.isfinite(loss)
        if self.first and self.as_json:
            output.line({"step": step, "loss": loss, "seconds": seconds})
        elif self.first:
            output.text(f"step {step:>4}  loss {loss:.6f}  {seconds:.3f} s")


def print_stages(trainer: Any, *, first: bool, as_json: bool) -> None:
    """Print staleness and weight versions by stage of an asynchronous trainer.

    All ranks must call this.
    """
    if not trainer.is_asynchronous or print_replica_counts(trainer, first=first, as_json=as_json):
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
        text += f", {_several(stage.copies, 'weight version')} at most"
        text += f", {_several(stage.skipped, 'update')} skipped" if stage.skipped else ""
        output.note(text if rho is None else f"{text}, rho {rho:.2f}")
    if describe_inaccurate_predictions(rhos):
        output.note(f"warning: {describe_inaccurate_predictions(rhos)}")


def _watching(plan: Plan, steps: int) -> dict[str, Any]:
    """Return options to measure the accuracy of weight prediction, if the plan predicts weights."""
    predicts = not SCHEDULES[plan.schedule].flushes and weight_mode(plan.weights).predicts
    return {"watch": max(1, steps // 20)} if predicts else {}


def _several(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count != 1 else "")


def _optimizer(request: CommandLineRequest, workload: Workload, lr: float | None) -> Any:
    """Return the optimizer with a learning rate, or None for the compiled one."""
    if lr is None:
        return None
    from fxpart.compat.optimizer_choice import choose

    make: Any = choose(request.optimizer or workload.optimizer or "adamw").make
    return partial(make, lr=lr)


def _batches(workload: Workload, program: Program) -> Iterator[Any]:
    """Yield the workload's data repeatedly, or the example batch in the global size."""
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
    """Return the example batch in the global size."""
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
