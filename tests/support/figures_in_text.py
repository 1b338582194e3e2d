"""The figures of an explanation as they are printed, compared with recomputed ones."""

from __future__ import annotations

import re
from typing import Any

import pytest
from figures_by_hand import MEMORY, NAMES

from fxpart.plan.model import Plan


def agree(found: Any, wanted: Any, path: str = "") -> None:
    """Equal structure, equal words, numbers equal to rounding."""
    if path == ".not_runnable":
        assert len(found) == len(wanted)
        assert all(word in text for word, text in zip(wanted, found, strict=True)), found
    elif isinstance(wanted, dict):
        assert set(found) == set(wanted), path
        for key, value in wanted.items():
            agree(found[key], value, f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), path
        for index, value in enumerate(wanted):
            agree(found[index], value, f"{path}[{index}]")
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9), path
    else:
        assert found == wanted, path


UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "%": 0.01, "": 1.0, "B": 1.0,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
         "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}  # fmt: skip


NUMBER = r"([-+]?[0-9.]+(?:e[-+][0-9]+)?) ?([a-zA-Zµ%]*)"


def shows(text: str, value: float) -> None:
    """The text is the value, rounded to the digits that it has."""
    match = re.fullmatch(NUMBER, text.strip())
    assert match, text
    digits = len(match[1].partition("e")[0].partition(".")[2])
    exponent = float(f"1e{match[1].partition('e')[2] or 0}")
    scale = UNITS[match[2]]
    slack = 0.5 * 10**-digits * exponent * scale * (1 + 1e-9)
    assert abs(float(match[1]) * scale - value) <= slack, (text, value)


def section(lines: list[str], title: str) -> list[str]:
    """The lines below the one that starts with a title, up to the next empty one."""
    at = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i in range(at, len(lines)) if not lines[i].strip()), len(lines))
    return lines[at + 1 : end]


def columns(head: str, line: str) -> list[str]:
    """The cells of a line of a table."""
    return re.split(r" {2,}", line.strip())


def shown_part(name: str, rows: list[dict[str, Any]]) -> bool:
    """Whether the table of memory has a column for a part: some only where a stage has it."""
    return name not in ("copies", "sums") or any(row["memory"][name] for row in rows)


def check_tables(lines: list[str], wanted: dict[str, Any]) -> None:
    """Stages and their memory, row by row."""
    rows = wanted["by_stage"]
    stages, memory = section(lines, "Stages"), section(lines, "Peak memory")
    if len(rows) > 16:
        return
    for one, line in zip(rows, stages[1:], strict=True):
        cells = columns(stages[0], line)
        assert cells[0] == str(one["stage"]) and cells[1] == one["blocks"]
        assert cells[2] == one["ranks"] or "…" in cells[2]
        shows(cells[-5], one["parameters"])
        for cell, value in zip(
            cells[-4:],
            (
                one["forward_seconds"], one["backward_seconds"],
                one["transfer_seconds"] + one["gather_seconds"], one["step_only_seconds"],
            ),
            strict=True,
        ):  # fmt: skip
            shows(cell, value)
    for one, line in zip(rows, memory[1:], strict=False):
        cells = columns(memory[0], line)
        figures = [one["total"], one["limit"], one["total"] / one["limit"]]
        held = [name for name in MEMORY if shown_part(name, rows)]
        figures += [one["memory"][name] for name in held] + [one["in_flight"]]
        assert cells[0] == one["ranks"] or "…" in cells[0]
        for cell, value in zip(cells[1:], figures, strict=True):
            if cell != "under 0.05 %":
                shows(cell, value)
            else:
                assert 0 < value < 0.0005


def check_hosts(text: str, wanted: dict[str, Any]) -> None:
    """A line for each host that ranks share."""
    found = re.findall(
        r"host +CPU contention of rank (.+?): a computation takes (\S+) times as long while "
        r"all compute, (\S+) alone \((\S+) in the seconds below\)", " ".join(text.split()),
    )  # fmt: skip
    assert len(found) == len(wanted["hosts"])
    for (ranks, full, alone, assumed), given in zip(found, wanted["hosts"], strict=True):
        assert ranks == given["ranks"]
        for words, value in ((full, given["slowdown"][-1]), (alone, given["slowdown"][0]),
                             (assumed, given["assumed"])):  # fmt: skip
            assert float(words) == pytest.approx(value, rel=5e-3)


def check_step(text: str, lines: list[str], wanted: dict[str, Any]) -> None:
    """The summary, what the step consists of, and the sentences."""
    step, pace, full = wanted["step"], wanted["bottleneck"], wanted["fullest"]
    match = re.search(
        r"(?m)^  step +(.+?) predicted \((.+)\), pipeline bubble (.+)\n"
        r"  throughput (\S+) samples/s(?:, (\S+) tokens/s)?"
        r"(?:, (\S+) TFLOP/s per device)?(?:, MFU (.+))?$", text,
    )  # fmt: skip
    assert match, "no line of step and throughput"
    shows(match[1], step["step_time"])
    assert match[2] == step["source"]
    shows(match[3], step["bubble"])
    found = step["throughput"]
    rates = [found[n] for n in ("samples_per_second", "tokens_per_second", "tflops_per_device")]
    for rate, shown in zip(rates, match.groups()[3:6], strict=True):
        assert (rate is None) == (shown is None)
        if shown:
            assert float(shown.replace(",", "")) == pytest.approx(rate, rel=5e-3)
    assert (found["mfu"] is None) == (match[7] is None)
    if match[7]:
        shows(match[7], found["mfu"])
    parts = {NAMES[k]: v for k, v in step["parts"].items() if k != "stage" and v > 1e-12}
    for (name, value), line in zip(parts.items(), section(lines, "Breakdown of")[1:], strict=False):
        cells = columns("", line)
        assert cells[0] == name
        shows(cells[1], value)
        if cells[2] != "under 0.05 %":
            shows(cells[2], value / step["closed_form_seconds"])
    flat = " ".join(text.split())
    match = re.search(
        r"Stage (\d+) is the bottleneck: (.+?) per microbatch, balance \(max/mean\) (.+?), and "
        r"(.+?) per step; (.+?) takes ([0-9.]+ %) of its time\.", flat,
    )  # fmt: skip
    assert match and int(match[1]) == pace["stage"] and match[5] == pace["largest"]
    for group, key in ((2, "microbatch_seconds"), (3, "balance"), (4, "step_only_seconds"),
                       (6, "largest_share")):  # fmt: skip
        shows(match[group], pace[key])
    match = re.search(r"(\d+) other stages? (?:is|are) as slow", flat)
    assert (int(match[1]) if match else 0) == pace["as_slow"]
    match = re.search(r"The next is stage (\d+): (.+?) instead of (.+?) without the time", flat)
    assert (match is None) == (pace["second"] is None)
    if match:
        assert int(match[1]) == pace["second"]
        shows(match[2], pace["second_bound_seconds"])
        shows(match[3], pace["bound_seconds"])
    match = re.search(
        r"Stage (\d+) \(rank ([^)]+)\) has the least free memory: (.+?) of (\S+ \S+)\.", flat
    )
    assert match and int(match[1]) == full["stage"]
    shows(match[3], full["free"])
    shows(match[4], full["limit"])


def check_rejected(text: str, lines: list[str], wanted: dict[str, Any]) -> None:
    """Both tables of rejected choices, and what binds."""
    for title, key in (("Rejected alternatives", "rejected"), ("With one decision", "changes")):
        if not wanted[key]:
            assert not any(line.startswith(title) for line in lines)
            continue
        for one, line in zip(wanted[key], section(lines, title)[1:], strict=True):
            cells = columns("", line)
            cells = cells if any(o["what"] for o in wanted[key]) else ["", *cells]
            assert (int(cells[1]), int(cells[2])) == (one["stages"], one["microbatches"])
            if one["closed_form_seconds"] is not None:
                match = re.fullmatch(r"(.+?) \((.+)\)", cells[4])
                assert match
                shows(match[1], one["closed_form_seconds"])
                shows(match[2], one["slower"])
            elif one["unfit_seconds"] is not None:
                match = re.fullmatch(r"\((.+) if it fit\)", cells[4])
                assert match
                shows(match[1], one["unfit_seconds"])
    flat = " ".join(text.split())
    match = re.search(r"Memory is the limit: .+? has a closed form of (.+?) \((.+?)\), but", flat)
    assert (match is None) == (not wanted["binding"])
    if match:
        best = min(wanted["binding"], key=lambda o: o["unfit_slower"])
        shows(match[1], best["unfit_seconds"])
        shows(match[2], best["unfit_slower"])


def check_certificate(text: str, wanted: dict[str, Any]) -> None:
    """Objective, bound and gap."""
    flat, given = " ".join(text.split()), wanted["certificate"]
    statuses = {
        "optimal": "optimal",
        "within gap": "within the requested gap of the optimum",
        "best found": "best found within the time limit",
    }
    form = (
        rf"Stages: {statuses[given['status']]}; objective (?P<objective>.+?), lower bound "
        r"(?P<lower_bound>.+?), gap (?P<gap>(?:under )?\S+ %)\."
    )
    match = re.search(form, flat)
    assert match, flat
    for key, value in match.groupdict().items():
        if value != "under 0.05 %":
            shows(value, given[key])


def check_text(text: str, plan: Plan, wanted: dict[str, Any]) -> None:
    """Compare the text of ``fxpart explain`` with recomputed figures."""
    lines = text.splitlines()
    spare = f" of {wanted['devices']} devices" if wanted["devices"] > wanted["ranks"] else ""
    read = ", microbatches routed by queues" if plan.staleness else ""
    read += f", weights {plan.weights}" if plan.schedule == "async" else ""
    assert lines[0].endswith(
        f"{wanted['stages']} stage{'s' * (wanted['stages'] > 1)} on {wanted['ranks']} "
        f"rank{'s' * (wanted['ranks'] > 1)}{spare}, "
        f"schedule {wanted['schedule']}{read}"
    )
    check_tables(lines, wanted)
    check_step(text, lines, wanted)
    check_hosts(text, wanted)
    check_rejected(text, lines, wanted)
    check_certificate(text, wanted)
