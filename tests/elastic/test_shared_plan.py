"""One plan for all ranks of torchrun, and the cluster that is there."""

from __future__ import annotations

from pathlib import Path

import elastic_programs as programs
import msgspec
import pytest
import sample_plans
from ranks import Pool

from fxpart.elastic.plan_broadcast import match_cluster_to_hosts
from fxpart.errors import FxpartError

replace = msgspec.structs.replace


@pytest.mark.slow
def test_rank_0_plans_and_all_have_it(pool: Pool) -> None:
    found = pool.run(programs.planned_by_rank_0, False, ranks=3, timeout=120)
    assert found == [[3, True, 3], [3, True, 0], [3, True, 0]]
    # What it cannot do is heard by all, in the same words.
    assert (
        pool.run(programs.planned_by_rank_0, True, ranks=3, timeout=120)
        == [["FXP204", "too large"]] * 3
    )


def test_the_devices_of_the_machines_that_are_there(tmp_path: Path) -> None:
    one = sample_plans.cluster(1)
    devices = tuple(
        replace(one.devices[0], name=f"{host}/{i}", host=host) for host in "abc" for i in (0, 1)
    )
    path = tmp_path / "cluster.json"
    replace(one, devices=devices).dump(path)
    left = match_cluster_to_hosts(str(path), ["c", "c", "a", "a"])
    assert [d.name for d in left.devices] == ["c/0", "c/1", "a/0", "a/1"]
    assert [d.name for d in match_cluster_to_hosts(str(path), ["b"]).devices] == ["b/0"]
    left.validate()
    # Names that the cluster does not have say nothing: then any devices will do.
    assert len(match_cluster_to_hosts(str(path), ["x", "y"]).devices) == 6
    assert len(match_cluster_to_hosts(str(path), ["a", "a", "a"]).devices) == 6
    with pytest.raises(FxpartError, match="FXP519"):
        match_cluster_to_hosts(str(path), ["x"] * 7)
