"""The picture of losses: well-formed, without script, and its points are the losses."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxpart.emulator.loss_plot import LossCurve, losses_svg, mean_curve, smoothed

SVG = "{http://www.w3.org/2000/svg}"
ALLOWED = {"svg", "title", "rect", "text", "path"}


def parsed(text: str) -> ElementTree.Element:
    """The root; only shapes and words are in it, nothing that runs or loads."""
    root = ElementTree.fromstring(text)
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in ALLOWED, element.tag
        for name in element.attrib:
            assert not name.startswith("on") and "href" not in name
    return root


def words(root: ElementTree.Element) -> list[str]:
    """All text in the picture."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def curves(root: ElementTree.Element) -> dict[str, list[tuple[float, float]]]:
    """By name the points of each curve, in the picture's own units."""
    found = {}
    for path in root.iter(f"{SVG}path"):
        title = path.find(f"{SVG}title")
        if title is not None:
            pairs = re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.attrib["d"])
            found[title.text or ""] = [(float(x), float(y)) for x, y in pairs]
    return found


def scale(root: ElementTree.Element) -> tuple[float, float, float, float]:
    """Updates and loss of a point from its place, read off the ticks: x = a + b u, y = c + d l."""
    across, up = {}, {}
    for text in root.iter(f"{SVG}text"):
        if text.attrib.get("text-anchor") == "middle" and (text.text or "").isdecimal():
            across[float(text.text or "")] = float(text.attrib["x"])
        elif text.attrib.get("text-anchor") == "end" and float(text.attrib["x"]) < 100:
            up[float(text.text or "")] = float(text.attrib["y"]) - 4
    (u0, x0), (u1, x1) = min(across.items()), max(across.items())
    (l0, y0), (l1, y1) = min(up.items()), max(up.items())
    b, d = (x1 - x0) / (u1 - u0), (y1 - y0) / (l1 - l0)
    return x0 - b * u0, b, y0 - d * l0, d


def values(root: ElementTree.Element, name: str) -> list[tuple[float, float]]:
    """(update, loss) of a curve's points by the picture's ticks."""
    a, b, c, d = scale(root)
    return [((x - a) / b, (y - c) / d) for x, y in curves(root)[name]]


def test_points_are_the_losses() -> None:
    losses = [2.3 * 0.97**i + 0.1 * math.sin(i) for i in range(80)]
    root = parsed(
        losses_svg([LossCurve("sync", losses), LossCurve("stash", losses[:40])], "t", window=1)
    )
    for name, known in (("sync", losses), ("stash", losses[:40])):
        points = values(root, name)
        assert [round(u) for u, _ in points] == list(range(1, len(known) + 1))
        assert [v for _, v in points] == pytest.approx(known, abs=0.005)
    assert "training loss" in words(root) and "updates" in words(root)
    assert f"{losses[-1]:.4g}" in words(root)


def test_smoothing_is_said_and_is_the_mean_of_the_last() -> None:
    losses = [float(i % 5) for i in range(100)]
    assert smoothed([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]
    root = parsed(losses_svg([LossCurve("sync", losses)], "t"))
    assert "training loss, mean of 5 updates" in words(root)
    assert [v for _, v in values(root, "sync")][4:] == pytest.approx([2.0] * 96, abs=0.005)


def test_names_are_escaped() -> None:
    name = '<script>alert("&")</script>\x1b[2J'
    root = parsed(losses_svg([LossCurve(name, [1.0, 2.0])], name))
    assert '<script>alert("&")</script>?[2J' in words(root)


def test_what_diverges_leaves_the_picture_and_is_told() -> None:
    losses = [1.0, 0.9, 40.0, 0.8, math.nan]
    root = parsed(
        losses_svg([LossCurve("naive", losses), LossCurve("sync", [1.0] * 5)], "t", window=1)
    )
    found = values(root, "naive")
    assert [v for _, v in found] == pytest.approx([1.0, 0.9, 0.8], abs=0.005)
    assert "diverged" in words(root)
    assert any("are not shown" in text for text in words(root))


def test_the_mean_of_runs_goes_as_far_as_the_shortest() -> None:
    assert mean_curve("x", [[1.0, 2.0, 3.0], [3.0, 4.0]]) == LossCurve("x", [2.0, 3.0])


@pytest.mark.slow
@given(
    st.lists(st.lists(st.floats(width=32), max_size=40), max_size=26),
    st.text(max_size=20),
)
def test_any_losses_make_a_picture(losses: list[list[float]], name: str) -> None:
    root = parsed(losses_svg([LossCurve(name, row) for row in losses], name))
    places = [p for points in curves(root).values() for p in points]
    assert all(0 <= x <= 900 and -1 <= y <= 481 for x, y in places)


def test_long_runs_stay_small() -> None:
    text = losses_svg([LossCurve("sync", [1 / (1 + i) for i in range(200_000)])], "t")
    assert len(text) < 100_000
    assert values(parsed(text), "sync")[-1][0] == pytest.approx(200_000, rel=1e-3)
