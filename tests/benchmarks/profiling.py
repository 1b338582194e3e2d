"""How long profiling takes: GPT-2 small for two ranks of this machine, and once more.

    python tests/benchmarks/profiling.py         (--layers 2 for a try; --dry keeps the results)

``fxpart profile`` runs in processes of its own with its default budget: for the model of 12 layers,
which nothing is known of; and the same again. Told are the seconds of profiling (measuring and
planning), of capturing the model before that, and of the whole process, with its imports and the
model's weights. Then the distinct operations are counted, those that are measured, of the model and
of one with half as many layers: repeated layers are measured once, if both have as many. At last
the profile says in turn that it is of another device and of another torch, and a plan by it is
asked for. Ends with 1 if anything is not so, or takes too long.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import HERE, ROOT, parser, write

BATCH, LENGTH = 8, 64
CLUSTER = "local:2"
MOST, AGAIN = 60.0, 2.0  # seconds of profiling: the first time, and a second


def small(layers: int = 12) -> Any:
    """GPT-2 small (or another number of its layers) on 8 rows of 64 tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from fxpart.capture.workload import Workload

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False)).train()
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, LENGTH))
    return Workload(model, {"input_ids": tokens, "labels": tokens.clone()})


def target(folder: Path, layers: int) -> str:
    """A file whose function makes the model, as fxpart takes it."""
    file = folder / f"gpt2_{layers}.py"
    lines = ["import sys", f"sys.path[:0] = {[str(ROOT), str(HERE)]!r}", "import profiling", ""]
    file.write_text("\n".join([*lines, f"def model():\n    return profiling.small({layers})", ""]))
    return f"{file}:model"


def fxpart(*arguments: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Wall seconds of a command, and what came of it."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "fxpart", *arguments], capture_output=True, text=True, cwd=ROOT
    )
    return time.perf_counter() - start, done


def profiled(model: str, path: Path, *more: str) -> dict[str, Any]:
    """One run of ``fxpart profile``: its seconds, and what was measured and what was known."""
    wall, done = fxpart("profile", model, "-c", CLUSTER, "-o", str(path), "--json", *more)
    if done.returncode:
        raise SystemExit(done.stderr)
    (found,) = json.loads(done.stdout)
    kept = (
        "seconds", "capture_seconds", "ops", "known_ops", "stages", "known_stages", "trial_runs",
        "known_trial_runs", "left_out",
    )  # fmt: skip
    sys.stderr.write(f"{model}: {found['seconds']:.2f} s, {wall:.1f} s in all\n")
    return {"wall": wall, **{name: found[name] for name in kept}}


def counted(layers: int, folder: Path) -> dict[str, int]:
    """Operations of the model's graph, and how many of them are distinct at 4 rows."""
    from fxpart.costmodels.profile_store import Profile

    from fxpart.planner.prepared_model import PlanningArguments, prepare_model
    from fxpart.pricing.variants import BatchSplit, Sizes
    from fxpart.profiling.ops import measure
    from fxpart.profiling.session import get_measurement_environment, on_device

    work = small(layers)
    asked = PlanningArguments(BATCH, None, "adamw", "roofline", {}, 0)
    given = (work.example, work.example_kwargs)
    front = prepare_model(
        work.model, CLUSTER, None, given, asked, {"loss": None, "batch_dims": None}
    )
    first = front.request.cluster.devices[0]
    path = folder / f"count_{layers}.profile"
    with on_device(first) as device, Profile(path, create=True) as profile:
        counts = measure(
            front.graph, front.captured, [Sizes(front.captured, BatchSplit(4, 1))], profile,
            get_measurement_environment(first.model, device), 0.0, device=device,
        )  # fmt: skip
    calls = sum(node.op == "call_function" for node in front.graph.graph.nodes)
    return {"operations": calls, "distinct": counts.left}


def refused(model: str, path: Path, folder: Path) -> dict[str, str]:
    """What a plan by the profile is answered where that is of another device, or torch."""
    answers = {}
    for name in ("chip", "torch"):
        other = folder / f"{name}.profile"
        shutil.copy(path, other)
        with sqlite3.connect(other) as base:
            for (table,) in base.execute("SELECT name FROM sqlite_master").fetchall():
                base.execute(
                    f"UPDATE {table} SET setting = json_set(setting, ?, ?)", (f"$.{name}", "1.0")
                )
        base.close()
        _, done = fxpart("plan", model, "-c", CLUSTER, "--profile", str(other))
        words = done.stderr.split()
        answers[name] = next((word.strip(":") for word in words if word.startswith("FXP")), "taken")
    return answers


def main() -> None:
    """Profile and again; then what is distinct, and what is refused."""
    made = parser(__doc__)
    made.add_argument("--layers", type=int, default=12)
    options = made.parse_args()
    with tempfile.TemporaryDirectory(prefix="fxpart-") as name:
        folder = Path(name)
        model, path = target(folder, options.layers), folder / "small.profile"
        first = profiled(model, path)
        again = profiled(model, path)
        layers = {n: counted(n, folder) for n in (options.layers, options.layers // 2)}
        answers = refused(model, path, folder)
    kept = {
        f"the first time under {MOST:g} s": first["seconds"] + first["capture_seconds"] < MOST,
        f"again under {AGAIN:g} s": again["seconds"] < AGAIN,
        "repeated layers once": len({found["distinct"] for found in layers.values()}) == 1,
        "others refused": set(answers.values()) == {"FXP406"},
    }
    figures = {
        "first": first, "again": again, "layers": layers, "refused": answers, "kept": kept,
    }  # fmt: skip
    write("profiling", figures, options)
    raise SystemExit(not all(kept.values()))


if __name__ == "__main__":
    main()
