"""``fxpart doctor``: check whether a model can be captured, and show problems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from fxpart.cli import output
from fxpart.cli.options import check_option, json_option

if TYPE_CHECKING:
    from fxpart.capture import CapturedModel
    from fxpart.capture.workload import Workload


@click.command()
@click.argument("target")
@click.option("--batch-size", "-b", type=click.IntRange(1), help="Global batch.")
@check_option
@json_option
def command(target: str, batch_size: int | None, check: str, as_json: bool) -> int:
    """Capture TARGET and show its inputs, batch, loss, parameters and blocks.

    Problems are shown as errors, each with the line of your source and a fix.
    """
    from fxpart.capture.workload import load_target

    found = examine(load_target(target), batch_size, target, check)
    if as_json:
        output.data(found)
    else:
        output.text("\n".join(describe(found)))
    return 0


def examine(
    workload: Workload, batch_size: int | None, target: str, check: str = "auto"
) -> dict[str, Any]:
    """Capture and prepare a model, compare it with the module, and return the findings.

    Raises errors of capture and passes, and FXP113.
    """
    from msgspec import to_builtins

    from fxpart.capture import capture
    from fxpart.capture.diagnosis import build_diagnosis as diagnosis
    from fxpart.compiler import PassManager
    from fxpart.passes import PREPARE, all_passes
    from fxpart.verification import check_module

    with output.show_activity(f"capturing {target}"):
        captured = capture(
            workload.model,
            workload.example,
            workload.example_kwargs,
            loss=workload.loss,
            batch_size=batch_size or workload.batch_size,
        )
        graph = PassManager(all_passes()).run(PREPARE, captured.graph)
        assert captured.source is not None, "a capture brings its module along"
        checked = check_module(*captured.source, captured, graph, check=check)
    inferred = workload.example is None and not workload.example_kwargs
    known = to_builtins(diagnosis(captured))
    return {
        "model": captured.model_name,
        "method": captured.method,
        "tried": list(captured.tried),
        "seconds": round(captured.seconds, 3),
        "batch": "symbolic" if captured.symbolic else "fixed",
        "batch_size": captured.batch_size,
        "example": "inferred" if inferred else "given",
        "loss": captured.loss_kind,
        "inputs": _inputs(captured),
        "outputs": list(captured.outputs),
        "parameters": sum(captured.state[n].numel() for n in captured.parameters),
        "parameter_tensors": len(captured.parameters),
        "buffers": len(captured.state) - len(captured.parameters),
        "ties": dict(captured.aliases),
        "ops": sum(node.op == "call_function" for node in graph.graph.nodes),
        "blocks": len(graph.meta["fxpart_blocks"]),
        "check": to_builtins(checked),
        **{name: known[name] for name in SPECIAL},
    }


def _inputs(captured: CapturedModel) -> list[dict[str, Any]]:
    return [
        {"name": i.name, "dtype": i.dtype, "shape": list(i.shape), "batch_dim": i.batch_dim}
        for i in captured.inputs
    ]


# Findings of a capture's diagnosis, with their labels.
SPECIAL = {
    "random": "random ops",
    "in_place": "in-place ops",
    "regions": "regions",
    "buffers_written": "written",
    "unused": "unused",
    "frozen": "frozen",
    "notes": "note",
}

LOSSES = {
    "given": "given",
    "output": "from the model's output",
    "mean-square": "none; the mean square of the outputs is used for comparison and costs only",
}


def describe(found: dict[str, Any]) -> list[str]:
    """Return the findings as lines of text."""
    from fxpart import units
    from fxpart.plan.model import ModuleCheck
    from fxpart.plan.summary import describe_check

    whole = [i["name"] for i in found["inputs"] if i["batch_dim"] is None]
    size = "any batch size" if found["batch"] == "symbolic" else "one microbatch size"
    rows = [
        ("captured", f"by {found['method']} in {found['seconds']:.1f} s, for {size}"),
        *(("failed method", tried) for tried in found["tried"]),
        ("example", f"{found['example']}, a batch of {found['batch_size']}"),
        *(("input", _input(i)) for i in found["inputs"]),
        ("loss", LOSSES.get(found["loss"], found["loss"])),
        ("parameters", f"{units.count(found['parameters'])} in {found['parameter_tensors']} "
         f"tensors, {units.plural(found['buffers'], 'buffer')}"),
        *(("tied", f"{name} = {main}") for name, main in found["ties"].items()),
        ("graph", f"{found['ops']} ops in {units.plural(found['blocks'], 'block')}: "
         f"up to {units.plural(found['blocks'], 'stage')}"),
    ]  # fmt: skip
    check = ModuleCheck(**found["check"])
    rows.append(("verified", describe_check(check)))
    for key, name in SPECIAL.items():
        if found[key]:
            rows += [(name, text) for text in _special(found[key])]
    if whole:
        rows.append(("not divided", f"every microbatch gets the whole of {', '.join(whole)}"))
    return [f"{found['model']} can be partitioned", *(f"  {k:<14}{v}" for k, v in rows)]


def _place(use: dict[str, Any]) -> str:
    return use["source"] or use["module"] or "the top of the model"


def _special(value: Any) -> list[str]:
    """Return texts of a finding: ops with their count and location, names, or sentences."""
    if isinstance(value, int):
        return [f"{value} parameters without a gradient"]
    if isinstance(value[0], dict):
        shown = [f"{use['op']} x{use['count']}, first at {_place(use)}" for use in value[:6]]
        return shown if len(value) <= 6 else [*shown, f"and {len(value) - 6} more kinds"]
    if " " in value[0]:
        return list(value)
    more = f" and {len(value) - 4} more" if len(value) > 4 else ""
    return [", ".join(value[:4]) + more]


def _input(item: dict[str, Any]) -> str:
    dims = [
        f"{d} (batch)" if i == item["batch_dim"] else str(d) for i, d in enumerate(item["shape"])
    ]
    return f"{item['name']} {item['dtype']}[{', '.join(dims)}]"
