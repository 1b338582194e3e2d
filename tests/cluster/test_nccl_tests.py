"""nccl-tests: tables whose times were made by a formula give that formula's numbers again."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.devices import CollectiveCurve
from fxpart.cluster.importers import nccl_tests
from fxpart.cluster.importers.registry import detect_format
from fxpart.cluster.importers.source_facts import ImportOptions
from fxpart.cluster.latency_bandwidth_fit import fit
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

DATA = Path(__file__).parent / "data"


def text(name: str) -> str:
    return next(DATA.glob(f"nccl_{name}.*")).read_text()


def curves(cluster: Cluster) -> dict[str, CollectiveCurve]:
    assert cluster.collectives is not msgspec.UNSET
    return {curve.operation: curve for curve in cluster.collectives}


def why(whole: str, facts: ImportOptions | None = None) -> str:
    with pytest.raises(FxpartError) as caught:
        nccl_tests.read(whole, facts or ImportOptions())
    assert caught.value.code == "FXP407"
    problem = caught.value.problems[0]
    return f"{problem.where}: {problem.why} {problem.fix}"


@pytest.mark.parametrize("path", sorted(DATA.glob("nccl_*")), ids=lambda p: p.stem)
def test_format_is_detected(path: Path) -> None:
    assert detect_format(path.read_text()) == "nccl-tests"


def test_a_table() -> None:
    """24 us + bytes x 2 x 7/8 / 235 GB/s, rounded to the digits that are printed."""
    cluster = nccl_tests.read(text("all_reduce_8xa100"), ImportOptions()).cluster
    assert [device.model for device in cluster.devices] == ["a100-sxm-80gb"] * 8
    assert cluster.devices[0].host == "node-a" and cluster.links == ()
    curve = curves(cluster)["all_reduce"]
    assert (curve.ranks, curve.hosts) == (8, 1)
    assert [size for size, _ in curve.points] == [8 * 4.0**i for i in range(13)]
    assert curve.points[0][1] == pytest.approx(24e-6, rel=1e-3)
    assert curve.latency == pytest.approx(24e-6, rel=2e-3)
    assert curve.inverse_bandwidth == pytest.approx(1.75 / 235e9, rel=5e-3)
    assert curve.residual < 0.002
    assert "A100" in curve.source and "float sum" in curve.source


def test_several_runs_in_one_text() -> None:
    cluster = nccl_tests.read(text("three_2x8xh100"), ImportOptions()).cluster
    assert len(cluster.devices) == 16 and len({d.host for d in cluster.devices}) == 2
    found = curves(cluster)
    assert set(found) == {"all_gather", "reduce_scatter", "all_to_all"}
    expected = {"all_gather": (40e-6, 180e9), "reduce_scatter": (42e-6, 170e9)}
    for name, (latency, rate) in expected.items():
        assert (found[name].ranks, found[name].hosts) == (16, 2)
        assert found[name].latency == pytest.approx(latency, rel=2e-3)
        assert found[name].inverse_bandwidth == pytest.approx(15 / 16 / rate, rel=5e-3)


def test_all_to_all_counts_the_whole_tensor() -> None:
    """Each of 16 ranks has what nccl-tests calls the size."""
    curve = curves(nccl_tests.read(text("three_2x8xh100"), ImportOptions()).cluster)["all_to_all"]
    assert curve.points[0][0] == 1024 * 16
    assert curve.inverse_bandwidth == pytest.approx(15 / 16 / 40e9 / 16, rel=5e-3)


def test_json() -> None:
    cluster = nccl_tests.read(text("all_reduce_4xa100"), ImportOptions()).cluster
    curve = curves(cluster)["all_reduce"]
    assert (curve.ranks, curve.hosts, len(curve.points)) == (4, 1, 5)
    assert curve.latency == pytest.approx(20e-6, rel=1e-4)
    assert curve.inverse_bandwidth == pytest.approx(1 / 150e9, rel=1e-4)
    assert "NCCL 2.28.3" in curve.source


def test_json_of_one_process_names_its_first_device_only() -> None:
    whole = json.loads(text("all_reduce_4xa100"))
    whole["config"]["ngpus"] = 4
    whole["config"]["devices"] = whole["config"]["devices"][:1]
    whole["results"][0]["out_of_place"] = None
    cluster = nccl_tests.read(json.dumps(whole), ImportOptions()).cluster
    assert len(cluster.devices) == 4
    curve = curves(cluster)["all_reduce"]
    assert curve.ranks == 4
    assert curve.points[0][1] == pytest.approx(21e-6, rel=1e-2)  # in place, there being no other


def test_a_link() -> None:
    into = Cluster.parse("2x8xa100")
    facts = ImportOptions(into=into)
    assert "host 'node-a'" in why(text("sendrecv"), facts)
    assert into.hosts is msgspec.UNSET
    renamed = text("sendrecv").replace("node-a", "host1")
    cluster = nccl_tests.read(renamed, facts).cluster
    for ends in (("host1/gpu:0", "host1/gpu:3"), ("host1/gpu:3", "host1/gpu:0")):
        link = cluster.link(*ends)
        assert link.latency == pytest.approx(9e-6, rel=3e-3)
        assert link.bandwidth == pytest.approx(220e9, rel=1e-2)
        assert link.kind == "nvlink" and link.curve is not msgspec.UNSET
    assert cluster.link("host1/gpu:0", "host1/gpu:1") == into.link("host1/gpu:0", "host1/gpu:1")
    assert "not a single link" in why(text("all_reduce_8xa100").replace("all_reduce", "sendrecv"))


def test_an_old_table_needs_the_operation() -> None:
    assert "--operation" in why(text("old_4xv100"))
    cluster = nccl_tests.read(text("old_4xv100"), ImportOptions(operation="all_reduce")).cluster
    curve = curves(cluster)["all_reduce"]
    assert curve.latency == pytest.approx(30e-6, rel=1e-2)
    assert curve.inverse_bandwidth == pytest.approx(1 / 60e9, rel=1e-3)


def test_again_takes_the_place_of_the_old() -> None:
    first = nccl_tests.read(text("all_reduce_8xa100"), ImportOptions()).cluster
    second = nccl_tests.read(text("all_reduce_4xa100"), ImportOptions(into=first)).cluster
    assert second.collectives is not msgspec.UNSET
    assert [curve.ranks for curve in second.collectives] == [8, 4]
    third = nccl_tests.read(text("all_reduce_8xa100"), ImportOptions(into=second)).cluster
    assert third == second


def test_labels_of_mpirun_and_srun() -> None:
    plain = nccl_tests.read(text("all_reduce_8xa100"), ImportOptions()).cluster
    for label in ("[1,0]<stdout>:", "0: "):
        whole = "\n".join(label + line for line in text("all_reduce_8xa100").splitlines())
        assert nccl_tests.read(whole, ImportOptions()).cluster == plain


def table(line: str) -> str:
    whole = text("all_reduce_8xa100").splitlines()
    place = next(i for i, row in enumerate(whole) if row.split()[:1] == ["8"])
    return "\n".join([*whole[:place], line, *whole[place + 1 :]])


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        (table("  8  2 float sum -1 22.5"), "the line has 6 columns, but the header has 13"),
        (table("  8  2 float sum -1 x 0 0 0 22.4 0 0 0"), "line 17: '8  2 float sum -1 x"),
        (table("  8  2 float sum -1 0.0 0 0 0 22.4 0 0 0"), "8 bytes in 0 us is not possible"),
        (table("  8  2 float sum -1 nan 0 0 0 22.4 0 0 0"), "not a finite number"),
        ("# nThread 1\n", "no header"),
        ("#  size count type time algbw\n", "no line of numbers"),
        ("# size count type time\n 8 2 float 1.0\n", "the ranks are unknown"),
    ],
)
def test_faults_name_the_line(whole: str, words: str) -> None:
    assert words in why(whole)


def test_programs_that_say_nothing_to_us() -> None:
    assert "does not use it" in why(text("all_reduce_8xa100").replace("all_reduce", "hypercube"))


def test_more_ranks_than_devices() -> None:
    assert "8 ranks took part" in why(
        text("all_reduce_8xa100"), ImportOptions(into=Cluster.local(2))
    )


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("config",), 3, "config: it is not an object"),
        (("config", "devices"), [], "config.devices: the list is empty"),
        (("results",), {}, "results: it is not a list"),
        (("results", 0, "size"), "x", "results[0].size"),
        (("results", 1, "out_of_place", "time"), -1, "is not possible"),
        (("results", 0), [], "results[0]: it is not an object"),
    ],
)
def test_faults_name_the_key(path: tuple[str | int, ...], value: object, words: str) -> None:
    whole = json.loads(text("all_reduce_4xa100"))
    place = whole
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert words in why(json.dumps(whole))


# the line through the points


@pytest.mark.slow
@given(
    st.floats(0, 1e-2),
    st.floats(0, 1e-6),
    st.lists(st.floats(1, 1e9), min_size=2, max_size=8, unique=True),
)
@settings(deadline=None)
def test_a_line_is_found_again(latency: float, inverse: float, sizes: list[float]) -> None:
    points = [(size, latency + inverse * size) for size in sizes]
    if any(seconds <= 1e-12 for _, seconds in points):
        return
    line = fit(points)
    a, b = line.latency, line.inverse_bandwidth
    assert line.typical < 1e-3
    for size, seconds in points:
        assert a + b * size == pytest.approx(seconds, rel=1e-2)


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1)), min_size=1, max_size=6))
@settings(deadline=None)
def test_no_other_line_fits_better(points: list[tuple[float, float]]) -> None:
    """Against steps away from it in every direction that leaves both numbers at 0 or above."""

    def loss(a: float, b: float) -> float:
        return sum(((a + b * size) / seconds - 1) ** 2 for size, seconds in points)

    line = fit(points)
    a, b = line.latency, line.inverse_bandwidth
    assert a >= 0 and b >= 0
    best = loss(a, b)
    for da, db in ((1e-3, 0.0), (-1e-3, 0.0), (0.0, 1e-3), (0.0, -1e-3)):
        other = (a + da * points[0][1], b + db * points[0][1] / points[0][0])
        if min(other) >= 0:
            assert loss(*other) >= best * (1 - 1e-6) - 1e-9
