"""``fxpart rules``: list ops with sharding rules, and propose a rule for an op."""

from __future__ import annotations

import json
from typing import Any

import click

from fxpart.cli import output
from fxpart.cli.options import json_option
from fxpart.errors import error

DISCOVER = "discover"


@click.command()
@click.argument("subjects", nargs=-1, metavar="[TARGET]... | discover OP")
@click.option("--batch-size", "-b", type=click.IntRange(1), help="Global batch of the targets.")
@click.option(
    "--arguments", metavar="JSON",
    help='With discover: arguments by name, {"dim": -1}; tensors by shape, {"x": "4x6"}.',
)  # fmt: skip
@json_option
def command(
    subjects: tuple[str, ...], batch_size: int | None, arguments: str | None, as_json: bool
) -> int:
    """Show which part of each TARGET has sharding rules, by ops and by FLOPs.

    Without a target, list all rules. `rules discover aten.kron` proposes a rule for an op by
    running it on random operands that are sharded in all possible ways.
    """
    if subjects and subjects[0] == DISCOVER:
        if len(subjects) != 2:
            raise error(
                "FXP109",
                where="rules discover",
                why=f"discover takes one op, but {len(subjects) - 1} are given",
                fix="pass a name such as aten.kron or aten.kron.default",
            )
        return _discover(subjects[1], arguments, as_json)
    if not subjects:
        return _table(as_json)
    found = {target: _coverage(target, batch_size) for target in subjects}
    if as_json:
        output.data(found)
    else:
        output.text("\n\n".join(_described(target, each) for target, each in found.items()))
    return 0


def _table(as_json: bool) -> int:
    """Print all families and their ops."""
    from fxpart.passes.rules import list_families

    families = list_families()
    if as_json:
        output.data(families)
        return 0
    total = sum(map(len, families.values()))
    lines = [f"{total} ops in {len(families)} families, and every op that torch tags as pointwise"]
    for name, ops in families.items():
        shown = ", ".join(op.removeprefix("aten.") for op in ops)
        lines.append(f"  {name:<14}{len(ops):>4}  {shown}")
    output.text("\n".join(lines))
    return 0


def _coverage(target: str, batch_size: int | None) -> dict[str, Any]:
    """Capture and prepare a model, and count its ops with rules."""
    from msgspec import to_builtins

    from fxpart.capture import capture
    from fxpart.capture.workload import load_target
    from fxpart.compiler import PassManager
    from fxpart.passes import PREPARE, all_passes
    from fxpart.pricing.rule_coverage import coverage

    workload = load_target(target)
    with output.show_activity(f"capturing {target}"):
        captured = capture(
            workload.model,
            workload.example,
            workload.example_kwargs,
            loss=workload.loss,
            batch_size=batch_size or workload.batch_size,
        )
        found = coverage([PassManager(all_passes()).run(PREPARE, captured.graph).graph])
    names = ("calls", "ruled", "cut", "flops", "flops_cut")
    return {**{name: getattr(found, name) for name in names}, "ops": to_builtins(found.ops)}


def _described(target: str, found: dict[str, Any]) -> str:
    """Return the coverage of a target as text: totals, then all ops that cannot be sharded."""

    def share(part: int, whole: int) -> str:
        return f"{part / whole:.1%}" if whole else "all"

    lines = [
        f"{target}",
        f"  ops     {found['calls']}, {share(found['ruled'], found['calls'])} with a rule, "
        f"{share(found['cut'], found['calls'])} can be sharded",
        f"  FLOPs   {found['flops']:.3g}, "
        f"{share(found['flops_cut'], found['flops'])} can be sharded",
    ]
    for op in found["ops"]:
        kept, none = op["whole"], op["calls"] - op["cuts"] - op["whole"]
        if kept:
            lines.append(f"  whole   {op['op']} x{kept}")
        if none:
            lines.append(f"  none    {op['op']} x{none}: replicated")
    return "\n".join(lines)


def _discover(name: str, arguments: str | None, as_json: bool) -> int:
    """Print a proposed rule, and how to accept it."""
    from fxpart.passes.rules.rule_discovery import discover, example

    op = _op(name)
    given = _given(arguments)
    with output.show_activity(f"running {op} on sharded operands"):
        found = example(op, given)
        if found is None:
            raise error(
                "FXP109",
                where=f"rules discover {name}",
                why="no valid arguments were found for the op",
                fix='pass --arguments \'{"self": "4x6", "dim": 0}\'',
            )
        proposal = discover(op, *found)
    if as_json:
        output.data({
            "op": proposal.op,
            "notation": proposal.notation,
            "additive": proposal.additive,
            "linear": [sorted(proposal.names[i] for i in some) for some in proposal.linear],
            "operands": proposal.operands,
            "entry": proposal.entry,
        })  # fmt: skip
        return 0
    shapes = ", ".join(
        f"{n}{list(s)}" for n, s in zip(proposal.names, proposal.operands, strict=True)
    )
    output.text(
        f"{proposal.op} on {shapes}\n\n  {proposal.entry}\n\n"
        "A dim with _ must not be sharded. To accept the rule, check it for other arguments, add\n"
        "the line to the TABLE of a file in passes/rules, and add an example of the op to\n"
        "tests/support/rule_examples_*.py, which the soundness test compares, including\n"
        "gradients. For an op of your own, call fxpart.register_op_rule with the notation."
    )
    return 0


def _op(name: str) -> Any:
    """Return the op overload of a name, by default the first one; FXP109 if there is none."""
    import torch

    parts = name.split(".")
    packet = None
    if 2 <= len(parts) <= 3:
        packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    overloads = packet.overloads() if packet is not None else []
    wanted = parts[2] if len(parts) == 3 else next(iter(overloads), "")
    if packet is None or wanted not in overloads:
        known = f"it has {', '.join(overloads)}" if overloads else "the op is unknown"
        fix = "pass a name such as aten.kron or aten.kron.default"
        raise error("FXP109", where=f"op {name[:60]!r}", why=known, fix=fix)
    return getattr(packet, wanted)


def _given(arguments: str | None) -> dict[str, Any]:
    """Return the values of --arguments, with random tensors for shapes; FXP109 if not valid."""
    import torch

    if arguments is None:
        return {}
    fix = 'write {"dim": -1, "x": "4x6"}'
    try:
        parsed = json.loads(arguments)
    except ValueError as fault:
        raise error(
            "FXP109", where="--arguments", why=f"not valid JSON: {fault}", fix=fix
        ) from fault
    if not isinstance(parsed, dict):
        raise error("FXP109", where="--arguments", why="it is not a JSON object", fix=fix)
    made = torch.Generator().manual_seed(0)

    def value(text: Any) -> Any:
        sizes = text.split("x") if isinstance(text, str) else []
        if sizes and all(s.isascii() and s.isdigit() and len(s) < 4 for s in sizes):
            return torch.rand(*map(int, sizes), generator=made, dtype=torch.float64)
        return text

    return {name: value(text) for name, text in parsed.items()}
