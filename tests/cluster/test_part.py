"""Some of a cluster's devices, with what is known of them."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from cluster_drawing import clusters
from hypothesis import given, settings
from hypothesis import strategies as st

from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError


@pytest.mark.slow
@given(clusters(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_part_is_valid_and_says_the_same(whole: Cluster, data: st.DataObject) -> None:
    """Devices in the order that was asked for; between two of them the link that there was."""
    places = range(len(whole.devices))
    taken = data.draw(st.lists(st.sampled_from(places), min_size=1, unique=True))
    part = whole.part(taken).validate()
    assert [d.name for d in part.devices] == [whole.devices[place].name for place in taken]
    for one, other in itertools.permutations(part.devices, 2):
        try:
            before = whole.link(one, other)
        except FxpartError as fault:
            with pytest.raises(FxpartError) as caught:
                part.link(one, other)
            assert caught.value.code == fault.code
        else:
            assert part.link(one, other) == before
    if whole.hosts is not msgspec.UNSET:
        assert part.hosts == tuple(
            h for h in whole.hosts if h.name in {d.host for d in part.devices}
        )
    assert whole.part(places).devices == whole.devices
    with pytest.raises(IndexError):
        whole.part([len(whole.devices)])
