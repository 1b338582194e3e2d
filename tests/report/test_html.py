"""The report: well-formed, self-contained, escaped, below a megabyte, and drawn by a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import msgspec
import pytest
import sample_plans
from hypothesis import given, settings
from pages import Page, count

from fxpart.plan.model import Plan
from fxpart.report.html import report_html

BROWSER = next(
    (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None
)


def test_everything_is_on_the_page() -> None:
    plan = sample_plans.plan()
    page = Page(report_html(plan))
    text = " ".join(page.words)
    for words in (
        "GPT2LMHeadModel", "Timeline", "Peak memory", "Stages", "Certificate", "Rejected",
        "Tied parameters", "within gap", "host0/cpu:3", "roofline",
    ):  # fmt: skip
        assert words in text, words
    assert count(page, "svg") == 2 and count(page, "h1") == 1
    # Each of the 2 * 4 * 8 computations is drawn, with its tooltip.
    assert len(re.findall(r"\d[FB]\d: ", text)) == 2 * 4 * 8


def test_accessible() -> None:
    page = Page(report_html(sample_plans.plan()))
    tags = dict(page.tags)
    assert tags["html"]["lang"] == "en"
    assert all(a.get("role") == "img" and a.get("aria-label") for t, a in page.tags if t == "svg")
    assert all(a.get("scope") == "col" for t, a in page.tags if t == "th")
    assert count(page, "title") >= 1


def assert_self_contained(text: str, page: Page) -> None:
    """Nothing that a browser would fetch, and no script but the one whose hash is allowed."""
    names = {name for name, _ in page.tags}
    assert not names & {"link", "img", "iframe", "object", "embed", "base", "form", "a"}
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text and count(page, "script") == 1
    for _, attributes in page.tags:
        assert not set(attributes) & {"src", "href", "onload", "onclick", "onerror"}
    style = text.split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in text


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></style><b>",
    "a & b < c > 'd' \"e\"",
    "]]> -->",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_a_model_are_escaped(name: str) -> None:
    plan = sample_plans.plan()
    plan = msgspec.structs.replace(
        plan,
        model=msgspec.structs.replace(plan.model, name=name),
        cluster=msgspec.structs.replace(plan.cluster, name=name),
        stages=tuple(msgspec.structs.replace(s, label=name) for s in plan.stages),
        ties=(msgspec.structs.replace(plan.ties[0], names=(name,)),),
        provenance={name: name},
        constraints={name: name},
        certificate=msgspec.structs.replace(plan.certificate, over=name, solver=name),
        alternatives=(msgspec.structs.replace(plan.alternatives[0], why=name),),
    )
    text = report_html(plan)
    page = Page(text)
    assert_self_contained(text, page)
    assert sum(name in w for w in page.words) >= 6


@pytest.mark.slow
@given(sample_plans.plans())
@settings(max_examples=25, deadline=None)
def test_any_valid_plan_can_be_drawn(plan: Plan) -> None:
    text = report_html(plan)
    assert_self_contained(text, Page(text))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "microbatches"), [(128, 512), (64, 1024), (16, 4096), (2, 9000)]
)
def test_large_plans_stay_below_a_megabyte(stages: int, microbatches: int) -> None:
    text = report_html(sample_plans.plan(stages, microbatches))
    assert len(text.encode()) < 1_000_000
    Page(text)
    if 2 * stages * microbatches > 12_000:
        assert f"of its {microbatches} microbatches" in text


def test_a_step_without_time() -> None:
    """All costs zero: nothing to divide by."""
    plan = sample_plans.plan(2, 2)
    ranks = tuple(
        msgspec.structs.replace(r, forward_seconds=0.0, backward_seconds=0.0, transfer_seconds=0.0)
        for r in plan.prediction.ranks
    )
    prediction = msgspec.structs.replace(
        plan.prediction, ranks=ranks, step_seconds=0.0, simulated_seconds=0.0
    )
    Page(report_html(msgspec.structs.replace(plan, prediction=prediction)))


def pixels(path: Path) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Width, height and colours of an 8-bit PNG, every 7th pixel of every 5th row."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    at, body, header = 8, b"", b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, chunk = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        header = chunk if kind == b"IHDR" else header
        body += chunk if kind == b"IDAT" else b""
        at += length + 12
    width, height, depth, colour = struct.unpack(">IIBB", header[:10])
    size = {2: 3, 6: 4}[colour]
    assert depth == 8
    raw, row, found = zlib.decompress(body), bytearray(width * size), []
    for y in range(height):
        start = y * (width * size + 1)
        line, kind_ = bytearray(raw[start + 1 : start + 1 + width * size]), raw[start]
        for x in range(len(line)):
            left = line[x - size] if x >= size else 0
            corner = row[x - size] if x >= size else 0
            line[x] = (line[x] + _predict(kind_, left, row[x], corner)) & 255
        row = line
        if y % 5 == 0:
            found += [(row[x], row[x + 1], row[x + 2]) for x in range(0, len(row), 7 * size)]
    return width, height, found


def _predict(kind: int, left: int, up: int, corner: int) -> int:
    """PNG's five filters."""
    if kind == 4:
        guess = left + up - corner
        return min((left, up, corner), key=lambda v: abs(guess - v))
    return (0, left, up, (left + up) // 2)[kind]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it(dark: bool, tmp_path: Path) -> None:
    assert BROWSER is not None
    page, shot = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(report_html(sample_plans.plan()), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *scheme,
         "--window-size=800,1200", f"--user-data-dir={tmp_path / 'profile'}",
         f"--screenshot={shot}", page.as_uri()],
        check=True, capture_output=True, timeout=90,
    )  # fmt: skip
    width, height, colours = pixels(shot)
    assert (width, height) == (800, 1200)
    background = max(set(colours), key=colours.count)
    assert (sum(background) < 150) is dark
    # Forwards are blue and backwards orange, in both schemes.
    blue = sum(b > r + 60 for r, g, b in colours)
    orange = sum(r > b + 60 for r, g, b in colours)
    assert blue > 50 and orange > 50
