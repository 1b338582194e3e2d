"""The two transports keep one contract; shapes are worked out from symbols."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Pool

from fxpart.errors import FxpartError
from fxpart.runtime import InProcess
from fxpart.runtime.batch.symbolic_shapes import make_shape_function
from fxpart.runtime.transport.interface import BACKWARD, FORWARD
from fxpart.runtime.transport.process_group_transport import ProcessGroupTransport

CPU = torch.device("cpu")


def talk(one_machine: bool, shared_memory: bool) -> list[object]:
    """Each rank's view of a round of every call; run on two ranks."""
    transport = ProcessGroupTransport(
        timeout=20.0, one_machine=one_machine, shared_memory=shared_memory
    )
    assert transport.shares_memory == (one_machine and shared_memory)
    me, other = dist.get_rank(), 1 - dist.get_rank()
    kinds = [
        (FORWARD, torch.int64, (2, 3)),
        (BACKWARD, torch.float32, ()),
        (FORWARD, torch.bool, (0,)),
    ]
    handles = [transport.post(other, me, c, s, d, CPU) for c, d, s in kinds]
    handles.append(transport.post(other, me, FORWARD, (4,), torch.bfloat16, CPU))
    sends = [transport.send(me, other, c, torch.full(s, 1 + me).to(d)) for c, d, s in kinds]
    sends.append(transport.send(me, other, FORWARD, torch.arange(4.0).to(torch.bfloat16)))
    found: list[object] = [transport.wait(h).tolist() for h in handles]
    for handle in sends:
        transport.wait(handle)
    found.append(transport.exchange([me, 2**62]))
    found.append(transport.exchange_bytes(b"x" * me))
    found.append(transport.exchange_bytes(b""))
    found.append(transport.broadcast(torch.tensor([me, 7]), 1).tolist())
    found.append(transport.total(torch.tensor([me + 1.0], dtype=torch.float64)).tolist())
    transport.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one_machine", "shared_memory"), [(True, True), (True, False), (False, True)]
)
def test_distributed(pool: Pool, one_machine: bool, shared_memory: bool) -> None:
    both = pool.run(talk, one_machine, shared_memory, ranks=2)
    for rank, found in enumerate(both):
        theirs = 2 - rank
        assert found == [
            [[theirs] * 3] * 2, float(theirs), [], [0.0, 1.0, 2.0, 3.0],
            [[0, 2**62], [1, 2**62]], [b"", b"x"], [b"", b""], [1, 7], [3.0],
        ]  # fmt: skip


def test_in_process_messages_are_told_apart_and_keep_their_order() -> None:
    transport = InProcess(2)
    first, second = (transport.post(0, 1, FORWARD, (1,), torch.float32, CPU) for _ in range(2))
    back = transport.post(0, 1, BACKWARD, (1,), torch.float32, CPU)
    assert not transport.ready(first)
    transport.send(0, 1, FORWARD, torch.tensor([1.0]))
    assert transport.ready(first) and not transport.ready(second) and not transport.ready(back)
    transport.send(0, 1, FORWARD, torch.tensor([2.0]))
    assert transport.wait(second).item() == 2.0
    assert transport.wait(first).item() == 1.0
    transport.send(0, 1, BACKWARD, torch.tensor([3.0]))
    assert transport.wait(back).item() == 3.0
    assert transport.exchange([4]) == [[4]]


def test_in_process_receivers_have_tensors_of_their_own() -> None:
    transport = InProcess(2)
    sent = torch.ones(2)
    transport.send(0, 1, FORWARD, sent)
    found = transport.wait(transport.post(0, 1, FORWARD, (2,), torch.float32, CPU))
    found.requires_grad_()
    assert not sent.requires_grad


def test_shapes_follow_their_symbols() -> None:
    of = make_shape_function(("b", 3, "2*b + s//2", "max(b, s)"))
    assert of({"b": 2, "s": 5}) == (2, 3, 6, 5)
    assert of({"b": 3, "s": 5}) == (3, 3, 8, 5)
    assert make_shape_function((4, 2))({}) == (4, 2)


@pytest.mark.parametrize("text", ["__import__('os')", "b.real", "b if s else 1", "lambda: 1"])
def test_a_shape_is_never_code(text: str) -> None:
    with pytest.raises(FxpartError):
        make_shape_function((text,))({"b": 2, "s": 5})
