"""Profiles: what goes in comes out, merging, damaged files, files of others."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from pathlib import Path

import msgspec
import pytest
from fxpart.costmodels import ProfileCostModel, find
from fxpart.costmodels.profile_store import (
    FORMAT,
    Calibration,
    ContentionProfile,
    MeasurementEnvironment,
    Profile,
    StageMeasurement,
    TimeQuartiles,
    chip,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError

HERE = MeasurementEnvironment(device="cpu", chip=chip(), threads=1, torch="2.11.0")
seconds = st.floats(0, 1e3)
texts = st.text(max_size=12)
timings = st.builds(TimeQuartiles, seconds, seconds, seconds, st.integers(1, 99))
stages = st.builds(
    StageMeasurement, forward=timings, backward=timings, optimizer=timings, rows=st.integers(1, 64),
    label=texts, parts=st.dictionaries(texts, seconds, max_size=3),
)  # fmt: skip
calibrations = st.builds(
    Calibration, factors=st.dictionaries(texts, seconds, max_size=3), action=seconds, step=seconds,
    residuals=st.lists(st.tuples(texts, seconds, seconds), max_size=2).map(tuple),
)  # fmt: skip
crowds = st.builds(
    ContentionProfile,
    slowdown=st.lists(st.floats(1, 9), max_size=4).map(tuple), transfer=st.floats(0, 2),
    baseline=st.integers(0, 1 << 40), overhead=st.floats(0, 1),
)  # fmt: skip
devices = st.sampled_from(["cpu", "h100-sxm"])
kinds = {"ops": timings, "stages": stages, "calibrations": calibrations, "crowding": crowds}
settings_ = st.builds(
    MeasurementEnvironment,
    device=devices, chip=st.sampled_from(["a", "b"]), threads=st.integers(0, 2),
    torch=st.sampled_from(["2.11.0", "2.12.0"]),
)  # fmt: skip
entries = st.one_of(
    [st.tuples(st.just(kind), settings_, texts, values) for kind, values in kinds.items()]
)
TYPES = {
    "ops": TimeQuartiles,
    "stages": StageMeasurement,
    "calibrations": Calibration,
    "crowding": ContentionProfile,
}


def opened(folder: str, name: str = "a.profile") -> Profile:
    return Profile(Path(folder) / name, create=True)


@pytest.mark.slow
@given(written=st.lists(entries, max_size=8))
@settings(max_examples=30, deadline=None)
def test_what_was_put_comes_back(
    written: list[tuple[str, MeasurementEnvironment, str, object]],
) -> None:
    """The oracle is a dict."""
    wanted: dict[tuple[str, MeasurementEnvironment], dict[str, object]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with opened(folder) as profile:
            for kind, setting, key, value in written:
                profile.put(kind, setting, {key: value}, "2026-01-01")
                wanted.setdefault((kind, setting), {})[key] = value
        with Profile(Path(folder) / "a.profile") as again:
            for (kind, setting), values in wanted.items():
                assert again.get(kind, setting, TYPES[kind]) == values
            assert set(again.settings()) == {setting for _, setting in wanted}
            assert len(list(again.rows())) == sum(map(len, wanted.values()))


@pytest.mark.slow
@given(mine=st.dictionaries(texts, st.tuples(timings, st.sampled_from("123"))),
       theirs=st.dictionaries(texts, st.tuples(timings, st.sampled_from("123"))))  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_a_merge_keeps_the_later(
    mine: dict[str, tuple[TimeQuartiles, str]], theirs: dict[str, tuple[TimeQuartiles, str]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with opened(folder) as one, opened(folder, "b.profile") as other:
            for profile, values in ((one, mine), (other, theirs)):
                for key, (value, day) in values.items():
                    profile.put("ops", HERE, {key: value}, f"2026-01-0{day}")
            newer = {k: v for k, v in theirs.items() if k not in mine or v[1] > mine[k][1]}
            assert one.merge(other) == len(newer)
            found = one.get("ops", HERE, TimeQuartiles)
            assert found == {k: v for k, (v, _) in {**mine, **newer}.items()}
            assert one.merge(other) == 0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A profile with one contention."""
    with Profile(tmp_path / "a.profile", create=True) as profile:
        profile.put("crowding", HERE, {"": ContentionProfile(slowdown=(1.0, 1.5))})
    return tmp_path / "a.profile"


def refused(code: str, path: Path, *words: str) -> None:
    with pytest.raises(FxpartError) as caught, Profile(path) as profile:
        for setting in profile.settings():
            for kind, of in TYPES.items():
                profile.get(kind, setting, of)
    assert caught.value.code == code
    assert all(word in str(caught.value) for word in words), caught.value


def test_files_that_are_no_profiles(path: Path, tmp_path: Path) -> None:
    refused("FXP405", tmp_path / "none.profile", "no such file")
    refused("FXP405", tmp_path)
    text = tmp_path / "text.profile"
    text.write_text("not a database, but long enough to be taken for one " * 20)
    refused("FXP405", text)
    other = tmp_path / "other.profile"
    with sqlite3.connect(other) as base:
        base.execute("CREATE TABLE ops (a)")
    refused("FXP405", other, "format 0")
    later = tmp_path / "later.profile"
    shutil.copy(path, later)
    with sqlite3.connect(later) as base:
        base.execute(f"PRAGMA user_version = {FORMAT + 1}")
    refused("FXP405", later, f"format {FORMAT + 1}")


@pytest.mark.parametrize(
    "change",
    [
        'UPDATE crowding SET value = \'{"slowdown": "no"}\'',
        "UPDATE crowding SET value = 'x'",
        "UPDATE crowding SET value = 5",
        "UPDATE crowding SET setting = '{}'",
        "UPDATE crowding SET setting = 'x'",
        "UPDATE crowding SET value = x'00ff'",
        "DROP TABLE stages",
    ],
)
def test_changed_contents(path: Path, change: str) -> None:
    with sqlite3.connect(path) as base:
        base.execute(change)
    refused("FXP405", path)
    with pytest.raises(FxpartError) as caught:
        find(path, cluster())
    assert caught.value.code == "FXP405"


@pytest.mark.slow
@given(places=st.lists(st.tuples(st.integers(0, 40000), st.integers(0, 255)), max_size=40))
@settings(max_examples=40, deadline=None)
def test_damaged_bytes_never_escape(places: list[tuple[int, int]]) -> None:
    """A file with any bytes changed or cut off is read, or refused as FXP405."""
    with tempfile.TemporaryDirectory() as folder:
        with opened(folder) as profile:
            profile.put("ops", HERE, {str(i): TimeQuartiles(1.0, 1.0, 1.0, 3) for i in range(50)})
        path = Path(folder) / "a.profile"
        data = bytearray(path.read_bytes())
        for place, value in places:
            data[place % len(data)] = value
        path.write_bytes(data[: len(data) - (places[0][0] % 9000 if places else 0)])
        try:
            with Profile(path) as profile:
                for setting in profile.settings():
                    profile.get("ops", setting, TimeQuartiles)
                list(profile.rows())
        except FxpartError as fault:
            assert fault.code == "FXP405"


def cluster(threads: int = 1, model: str = "cpu") -> Cluster:
    local = Cluster.local(2)
    devices = tuple(msgspec.structs.replace(d, threads=threads, model=model) for d in local.devices)
    return msgspec.structs.replace(local, devices=devices)


def test_another_setting_is_refused_and_named(path: Path) -> None:
    assert isinstance(find(path, cluster()), ProfileCostModel)
    assert isinstance(find(str(path), cluster(), torch="2.11.0"), ProfileCostModel)
    for given_, torch, words in (
        (cluster(threads=2), "", ("threads: 1", "threads: 2")),
        (cluster(model="h100-sxm"), "", ("cpu (", "h100-sxm")),
        (cluster(), "2.12.0", ("torch 2.11.0", "torch 2.12.0")),
    ):
        with pytest.raises(FxpartError) as caught:
            find(path, given_, torch=torch)
        assert caught.value.code == "FXP406"
        assert all(word in str(caught.value) for word in words), caught.value


def test_another_chip_of_this_host_is_refused(tmp_path: Path) -> None:
    other = msgspec.structs.replace(HERE, chip="8086 x 1")
    with Profile(tmp_path / "b.db", create=True) as profile:
        profile.put("ops", other, {"x": TimeQuartiles(1.0, 1.0, 1.0, 1)})
    with pytest.raises(FxpartError) as caught:
        find(tmp_path / "b.db", cluster())
    assert caught.value.code == "FXP406" and "8086" in str(caught.value)
    far = cluster()
    far = msgspec.structs.replace(
        far, devices=tuple(msgspec.structs.replace(d, host="far") for d in far.devices)
    )
    assert isinstance(find(tmp_path / "b.db", far), ProfileCostModel)


def test_of_several_versions_the_running_one_counts(path: Path) -> None:
    newer = msgspec.structs.replace(HERE, torch="2.13.0+cpu")
    with Profile(path) as profile:
        profile.put("ops", newer, {"x": TimeQuartiles(1.0, 1.0, 1.0, 1)})
    device = cluster().devices[0]
    for version, wanted in (("2.11.0", HERE), ("2.13.0+cpu", newer), ("", newer)):
        found = find(path, cluster(), torch=version)
        assert isinstance(found, ProfileCostModel) and found.setting_of(device) == wanted


def test_names_that_are_no_files() -> None:
    with pytest.raises(FxpartError) as caught:
        find("rooflines")
    assert caught.value.code == "FXP109"
    with pytest.raises(FxpartError) as caught:
        find("missing.profile")
    assert caught.value.code == "FXP405"
