"""DTensor there and back over gloo."""

from __future__ import annotations

import pytest
import torch
from cut_runs import piece
from ranks import Pool
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import Partial as TorchPartial

from fxpart import collectives as C
from fxpart.collectives.dtensor_conversion import device_mesh, from_dtensor, to_dtensor
from fxpart.errors import FxpartError
from fxpart.sharding import Mesh, parse_placements


def there_and_back(text: str, cuts: list[str]) -> None:
    """Whole tensors of DTensors made of parts, and parts of DTensors."""
    mesh = Mesh.parse(text)
    comm = C.GroupCommunicator(mesh, timeout=20.0)
    on = device_mesh(mesh)
    whole = torch.arange(12 * 5.0).view(12, 5)
    for cut in cuts:
        placements = parse_placements(cut, mesh)
        local = piece(whole, placements, mesh, comm.mesh_rank)
        made = to_dtensor(comm, local, placements, on, whole.shape)
        assert isinstance(made, DTensor) and made.shape == whole.shape
        parts = 2 ** cut.count("P")
        assert torch.equal(made.full_tensor(), whole * parts), cut
        back, found = from_dtensor(made, mesh)
        assert torch.equal(back, piece(whole, found, mesh, comm.mesh_rank)), cut
        if "," not in cut.replace(",b:", "").replace(",a:", ""):
            assert torch.equal(back, local)
    theirs = distribute_tensor(whole, on, [Shard(1)] * len(mesh.axes))
    back, found = from_dtensor(theirs, mesh)
    assert torch.equal(back, piece(whole, found, mesh, comm.mesh_rank))
    with pytest.raises(FxpartError, match="mesh"):
        from_dtensor(theirs, Mesh.parse("a=5"))
    averaged = DTensor.from_local(
        whole, on, [TorchPartial("avg"), *[Replicate()] * (len(mesh.axes) - 1)], run_check=False
    )
    with pytest.raises(FxpartError, match="FXP109"):
        from_dtensor(averaged, mesh)


@pytest.mark.slow
def test_there_and_back(pool: Pool) -> None:
    pool.run(there_and_back, "a=2", ["a:S(0)", "a:S(1)", "a:R", "a:P", "a:S(0,3)", ""], ranks=2)
    cuts = ["a:S(0),b:S(0)", "a:S(1),b:S(0,3)", "a:S(0),b:S(0,3)", "a:S(0,2),b:S(0)", "a:P,b:S(1)"]
    pool.run(there_and_back, "a=2,b=2", cuts, ranks=4)
