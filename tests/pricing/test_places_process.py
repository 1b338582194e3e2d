"""What is left of a device for tensors, once its rank's process is there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from fxpart.costmodels.profile_store import ContentionProfile
from zoo import ZOO

import fxpart
from fxpart import costmodels
from fxpart.cluster.model import Cluster, Device
from fxpart.costs import DeviceKnowledge
from fxpart.errors import FxpartError
from fxpart.pricing.device_limits import RESERVE, VARIES, get_usable_bytes, limits

GIB = 1 << 30


@dataclass
class Weighing:
    """A cost model that knows a host's processes as well."""

    found: ContentionProfile
    base: Any = field(default_factory=lambda: costmodels.find("auto"))

    def knowledge(self, device: Device) -> DeviceKnowledge:
        """Return the same contention on every host."""
        return replace(self.base.knowledge(device), contention=self.found)

    def for_model(self, fingerprint: str) -> Weighing:
        """Return the model itself."""
        return self

    def for_part(self, cluster: Cluster) -> Weighing:
        """Return the model itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        """What the other one answers."""
        return getattr(self.base, name)


def _cluster(memory: int, kind: str = "cpu") -> Cluster:
    whole = Cluster.parse("local:2")
    devices = tuple(
        msgspec.structs.replace(device, memory=memory, kind=kind) for device in whole.devices
    )
    return msgspec.structs.replace(whole, devices=devices)


def test_a_process_leaves_its_tensors_what_it_does_not_take() -> None:
    model = Weighing(ContentionProfile(baseline=300 << 20, overhead=0.25))
    (device, _) = _cluster(GIB).devices
    left = get_usable_bytes(device, model)
    assert left == int((GIB * (1 - VARIES) - (300 << 20)) / 1.25)
    assert [limit.memory for limit in limits(_cluster(GIB), model)] == [left, left]


def test_of_a_large_device_the_share_is_kept_that_was_always_kept() -> None:
    model = Weighing(ContentionProfile(baseline=300 << 20, overhead=0.01))
    (device, _) = _cluster(100 * GIB).devices
    assert get_usable_bytes(device, model) == int(100 * GIB * (1 - RESERVE))


@pytest.mark.parametrize("model", [costmodels.find("auto"), Weighing(ContentionProfile())])
def test_what_was_not_measured_takes_nothing(model: Any) -> None:
    (device, _) = _cluster(GIB).devices
    assert get_usable_bytes(device, model) == int(GIB * (1 - RESERVE))


def test_other_devices_have_no_process_in_their_memory() -> None:
    model = Weighing(ContentionProfile(baseline=300 << 20, overhead=0.25))
    (device, _) = _cluster(GIB, "cuda").devices
    assert get_usable_bytes(device, model) == int(GIB * (1 - RESERVE))


@pytest.mark.slow
def test_plans_of_stages_that_recompute_say_what_processes_take() -> None:
    built, model = (
        ZOO["mlp"].build(),
        Weighing(ContentionProfile(baseline=300 << 20, overhead=0.25)),
    )
    plan = fxpart.compile(
        built.model, _cluster(GIB), example_inputs=built.batch, loss=built.loss, microbatches=2,
        cost_model=model, constraints={"dp": 1, "tp": 1, "stages": 2, "recompute": "full"},
    ).plan  # fmt: skip
    assert len(plan.prediction.ranks) == 2
    for row in plan.prediction.ranks:
        lost = row.allocator - VARIES / 2 * (row.process + 1.25 * row.tensors)
        assert row.process == 300 << 20 and lost == pytest.approx(0.25 * row.tensors, abs=1)


def _compiled(memory: int, model: Any) -> Any:
    """One stage, which has one cut only."""
    built = ZOO["mlp"].build()
    return fxpart.compile(
        built.model, _cluster(memory), example_inputs=built.batch, loss=built.loss,
        microbatches=2, cost_model=model,
        constraints={"stages": 1, "mesh": "none", "recompute": "none"},
    )  # fmt: skip


@pytest.mark.slow
def test_a_plan_says_what_its_processes_take_and_fits_with_them() -> None:
    model = Weighing(ContentionProfile(baseline=300 << 20, overhead=0.25))
    plan = _compiled(GIB, model).plan
    for entry in plan.prediction.ranks:
        assert entry.process == 300 << 20
        lost = entry.tensors * 0.25
        spread = VARIES / 2 * (entry.process + entry.tensors + lost)
        assert entry.allocator == round(lost + spread)
        assert entry.resident == entry.process + entry.tensors + entry.allocator
    most = max(entry.resident for entry in plan.prediction.ranks)
    enough = int(most / (1 + VARIES / 2) / (1 - VARIES))
    assert _compiled(enough + 4, model).plan.stages == plan.stages, "just enough"
    with pytest.raises(FxpartError) as caught:
        _compiled(enough - 4, model)
    assert caught.value.problems[0].code.startswith("FXP2")


@pytest.mark.slow
def test_without_measurements_a_plan_says_nothing_of_processes() -> None:
    for entry in _compiled(GIB, "auto").plan.prediction.ranks:
        assert entry.process == entry.allocator == entry.resident == 0
