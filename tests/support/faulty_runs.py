"""Runs whose system calls fail: what may happen then, and what the next start has to give."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import fault_injection
import torch
from run_folders import heard, same, train

from fxpart.checkpoint import folder
from fxpart.errors import FxpartError
from fxpart.runtime.training_run.ledger import check_ledger

STEPS, MORE = 6, 8
# What a start may end with, if the fault comes before it trains or the run is strict.
REFUSED = ("FXP513", "FXP603")
State = dict[str, torch.Tensor]


@dataclass
class FaultCounts:
    """What became of the runs. ends: by how the faulty start ended. wrong: what must not be."""

    injected: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def run_with_faults(root: Path, injections: int, seed: int) -> FaultCounts:
    """Run so many times, each with a fault at another call, and resume each without faults."""
    draw, counts = random.Random(seed), FaultCounts()
    references = {steps: train(root / f"whole-{steps}", steps)[1] for steps in (STEPS, MORE)}
    fault_injection.arm(root / "counted", 1 << 40, 1, 5)
    train(root / "counted", STEPS)
    calls = fault_injection.disarm()
    for number in range(injections):
        path = root / f"run-{number}"
        kind = draw.choice(sorted(fault_injection.ERRORS))
        at, count = draw.randint(1, calls), draw.choice((1, 1, 3, 1 << 40))
        strict, began = draw.random() < 0.3, draw.random() < 0.5
        what = f"{kind} at call {at}, {count} calls, strict {strict}, resumed {began}, seed {seed}"
        if began:
            train(path, 2)
        end = _run(path, references[STEPS], (at, count, fault_injection.ERRORS[kind]), strict)
        counts.injected += 1
        counts.ends[end if not end.startswith("wrong") else "wrong"] += 1
        wrong = [end] if end.startswith("wrong") else []
        wrong += _resume(path, references[MORE])
        counts.wrong += [f"{each}: {what}" for each in wrong]
        shutil.rmtree(path, ignore_errors=True)
    return counts


def _run(path: Path, reference: State, fault: tuple[int, int, int], strict: bool) -> str:
    """Run to the end with a fault; return how it ended."""
    fault_injection.arm(path, *fault)
    try:
        with heard():
            found, state = train(path, STEPS, strict=strict)
    except FxpartError as failure:
        # Each rank's failure is reported by its code; a callback of the test has none.
        return failure.code if failure.code in REFUSED else f"wrong: {failure}"
    except Exception as failure:
        return f"wrong: {type(failure).__name__}: {failure}"
    finally:
        fault_injection.disarm()
    if not same(state, reference):
        return "wrong: other numbers"
    newest = folder.list_complete(path / "checkpoints")
    there = bool(newest) and folder.step_of(newest[0]) == STEPS
    if found.saved and not (there and not folder.Checkpoint.open(newest[0]).verify()):
        return "wrong: saved is said, and it is not"
    return "saved" if found.saved else "not saved"


def _resume(path: Path, reference: State) -> list[str]:
    """Go on without faults; return what is wrong."""
    try:
        with heard():
            found, state = train(path, MORE)
    except Exception as failure:
        return [f"wrong: resumed: {type(failure).__name__}: {failure}"]
    wrong = [] if same(state, reference) else ["wrong: other numbers when resumed"]
    wrong += [] if found.saved else ["wrong: not saved when resumed"]
    problems = check_ledger(path / "steps.jsonl").problems
    return wrong + [f"wrong: ledger: {problem}" for problem in problems[:1]]
