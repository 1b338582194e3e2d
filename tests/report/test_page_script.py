"""The script of the report, run by a headless Chromium: details, ranks, colors, layout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_plans
from report.test_overlay import recorded, sample, wrong

from fxpart.plan.model import Plan
from fxpart.report.comparison_builder import compare
from fxpart.report.html import report_html
from fxpart.report.page_assets import SCRIPT

BROWSER = next(
    (b for b in ("chromium", "chromium-browser", "google-chrome") if shutil.which(b)), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
pytestmark = pytest.mark.slow

# Runs after the page's own script, and leaves what it finds in an attribute.
DRIVER = """
(() => {
  const found = {};
  const detail = document.getElementById("detail");
  const point = (svg, x, y) => {
    const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
    return { clientX: at.x, clientY: at.y, bubbles: true };
  };
  const over = (element, x, y) => {
    element.dispatchEvent(new PointerEvent("pointermove", point(element.ownerSVGElement, x, y)));
    const box = detail.getBoundingClientRect();
    return { text: detail.hidden ? "" : detail.textContent, left: box.left, right: box.right };
  };
  const middle = (rect) => ["x", "width", "y", "height"].map((n) => Number(rect.getAttribute(n)));
  found.rects = [...document.querySelectorAll("svg[data-row] rect")].map((rect) => {
    const [x, width, y, height] = middle(rect);
    return over(rect, x + width / 2, y + height / 2).text;
  });
  found.paths = [...document.querySelectorAll("path[data-kind]")].slice(0, 40).map((path) => {
    const [, x, y, width] = /^M([\\d.]+) ([\\d.]+)h([\\d.]+)/.exec(path.getAttribute("d"));
    return over(path, Number(x) + Number(width) / 2, Number(y) + 2).text;
  });
  const visible = () => [...document.querySelectorAll("svg[data-row]")].map((svg) => ({
    ranks: [...svg.querySelectorAll("g[data-ranks]")].filter((g) => g.style.display !== "none")
      .map((g) => g.dataset.ranks),
    height: svg.getAttribute("viewBox").split(" ")[3],
  }));
  const input = document.querySelector(".tools input");
  const enter = (text) => {
    input.value = text;
    input.dispatchEvent(new Event("input"));
    return { shown: visible(), valid: input.checkValidity() };
  };
  if (input) {
    found.all = visible();
    found.some = enter("1-2");
    found.wrong = enter("one");
    found.none = enter("");
  }
  const button = document.querySelector(".tools button");
  const color = () => getComputedStyle(document.body).backgroundColor;
  found.themes = [0, 1, 2].map(() => {
    const now = [document.documentElement.dataset.theme || "", color()];
    button.click();
    return now;
  });
  found.overflow = document.documentElement.scrollWidth - window.innerWidth;
  found.width = window.innerWidth;
  found.outside = [...document.querySelectorAll("svg")].flatMap((svg) => {
    const whole = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((text) => {
      const box = text.getBoundingClientRect();
      return box.left < whole.left - 1 || box.right > whole.right + 1 ||
        box.top < whole.top - 1 || box.bottom > whole.bottom + 1;
    }).map((text) => text.textContent);
  });
  const boxes = (query) => [...document.querySelectorAll(query)].map((e) =>
    [e.textContent, e.getBoundingClientRect(), e]);
  found.overlapping = [];
  const cards = boxes(".cards div");
  for (const [text, box, card] of cards) {
    if (card.scrollWidth > card.clientWidth + 1) found.overlapping.push(text);
  }
  for (const [text, box, cell] of boxes("th")) {
    if (cell.scrollWidth > cell.clientWidth + 1) found.overlapping.push(text);
  }
  for (const svg of document.querySelectorAll("svg")) {
    const texts = [...svg.querySelectorAll("text.axis")].map((t) => t.getBoundingClientRect());
    texts.forEach((a, i) => texts.slice(i + 1).forEach((b) => {
      if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 &&
          b.top < a.bottom - 2) found.overlapping.push("axis");
    }));
  }
  document.body.dataset.found = JSON.stringify(found);
})();
"""


def browse(text: str, folder: Path, width: int, *options: str) -> str:
    """The page's elements after its scripts have run."""
    assert BROWSER is not None
    page = folder / "report.html"
    page.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
         f"--user-data-dir={folder / 'profile'}", *options, "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return done.stdout


def drive(text: str, folder: Path, width: int = 1280) -> dict[str, Any]:
    """What the driver finds; the policy of the page would not let it run."""
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    dom = browse(free.replace("</body>", f"<script>{DRIVER}</script></body>"), folder, width)
    found = re.search(r'data-found="([^"]*)"', dom)
    assert found is not None, dom[:2000]
    result: dict[str, Any] = json.loads(unescape(found[1]))
    return result


def test_script_is_small_and_fetches_nothing() -> None:
    assert len(SCRIPT) < 8000
    for name in ("fetch", "XMLHttpRequest", "import(", "eval", "innerHTML", "http:", "https:"):
        assert name not in SCRIPT


@needs_browser
def test_policy_lets_the_script_run_and_no_other(tmp_path: Path) -> None:
    text = report_html(sample_plans.plan())
    other = "<script>document.body.dataset.other = 1</script></body>"
    dom = browse(text.replace("</body>", other), tmp_path, 1280)
    assert 'class="tools"' in dom and 'id="detail"' in dom
    assert "data-other" not in dom


@needs_browser
def test_blocks_show_what_and_how_long(tmp_path: Path) -> None:
    """Every computation, transfer and update of a plan of 4 stages and 8 microbatches."""
    found = drive(report_html(sample_plans.plan()), tmp_path)
    texts = found["rects"]
    assert all(texts) and found["paths"] == []
    assert texts.count("") == 0 and sum("forward of microbatch" in text for text in texts) == 32
    assert any(
        re.fullmatch(
            r"0F0: forward of microbatch 0\nstage 0, rank 0\npredicted 10\.0 ms, from 0 s to "
            r"10\.0 ms", text,
        )
        for text in texts
    ), texts[:3]  # fmt: skip
    assert found["themes"][0][0] == "" and [t[0] for t in found["themes"][1:]] == ["light", "dark"]
    light, dark = found["themes"][1][1], found["themes"][2][1]
    assert light == "rgb(255, 255, 255)" and dark == "rgb(20, 23, 31)"


@needs_browser
def test_measured_and_predicted_are_both_shown(tmp_path: Path) -> None:
    plan = sample()
    recording = recorded(wrong(plan, 1, "forward_seconds", 2), of=plan)
    found = drive(report_html(plan, recording, compare(plan, recording)), tmp_path)
    assert "measured 1F0: 20.0 ms\npredicted 10.0 ms" in found["rects"]
    assert "predicted 1F0: 10.0 ms\nmeasured 20.0 ms" in found["rects"]
    assert any("1F0: forward" in t and t.endswith("measured 20.0 ms") for t in found["rects"])
    assert [picture["ranks"] for picture in found["some"]["shown"]] == [["1", "2"]] * 2


@needs_browser
def test_ranks_are_selected(tmp_path: Path) -> None:
    """Two rows of four; the others leave no gap. Ranks of one stage share a row."""
    found = drive(report_html(sample_plans.plan()), tmp_path)
    assert found["all"] == [{"ranks": ["0", "1", "2", "3"], "height": "150"}]
    assert found["some"]["shown"] == [{"ranks": ["1", "2"], "height": "90"}]
    assert found["wrong"]["valid"] is False and found["some"]["valid"] is True
    assert found["none"]["shown"] == found["all"]
    plan = sample_plans.plan(2)
    stages = [msgspec.structs.replace(s, ranks=(2 * k, 2 * k + 1)) for k, s in
              enumerate(plan.stages)]  # fmt: skip
    wide: Plan = msgspec.structs.replace(
        sample_plans.plan(4), stages=tuple(stages), prediction=plan.prediction
    )
    found = drive(report_html(wide), tmp_path)
    assert found["all"][0]["ranks"] == ["0-1", "2-3"]
    assert found["some"]["shown"][0]["ranks"] == ["0-1", "2-3"]


@needs_browser
def test_blocks_of_large_schedules_are_found_in_their_path(tmp_path: Path) -> None:
    text = report_html(sample_plans.plan(16, 400))
    found = drive(text, tmp_path)
    assert len(found["paths"]) == 40 and all(found["paths"])
    first = found["paths"][0]
    assert re.match(r"(forward|backward) of microbatch \d+\nstage 0, rank 0\nabout ", first), first


@needs_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overlaps_or_is_clipped(width: int, tmp_path: Path) -> None:
    """At the width of a desktop and of a phone; wide pictures scroll within their frame."""
    plan = sample()
    recording = recorded(wrong(plan, 1, "forward_seconds", 2), of=plan)
    text = report_html(plan, recording, compare(plan, recording))
    found = drive(text, tmp_path, width)
    assert found["outside"] == [] and found["overlapping"] == []
    assert found["overflow"] <= 0 and found["width"] <= max(width, 500)
