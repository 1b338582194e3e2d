"""Who is to blame, from what is known of the others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from fxpart.collectives.failures import ALL, NO_RANK
from fxpart.runtime.heartbeat.message import (
    ExitNotice,
    HeartbeatMessage,
    PeerLossNotice,
    decode_messages,
    encode_message,
)
from fxpart.runtime.heartbeat.monitored_peer import MonitoredPeer, RankIdentity
from fxpart.runtime.heartbeat.peer_diagnosis import (
    describe_peers,
    diagnose_blocking_peer,
    diagnose_lost_peer,
    diagnose_silent_peer,
)
from fxpart.runtime.heartbeat.rendezvous import partners

NOW = 100.0


def peer(rank: int, **more: Any) -> MonitoredPeer:
    return MonitoredPeer(
        rank, RankIdentity(0, 4000 + rank, 1), socket.socket(), **{"last_message": NOW, **more}
    )


def waits(rank: int, whom: int, **more: Any) -> MonitoredPeer:
    return peer(rank, beat=HeartbeatMessage(f"event of {rank}", 1.0, whom, 1.0), **more)


def test_nobody_is_to_blame() -> None:
    peers = [waits(0, 1), waits(1, 2), waits(2, ALL)]
    assert diagnose_lost_peer(peers, NOW) is None and diagnose_silent_peer(peers, NOW, 1.0) is None


def test_the_first_that_is_gone_without_a_word() -> None:
    """Not those that ended because of it, though their connections may be seen to end earlier."""
    because = PeerLossNotice("FXP514", 2, "rank 2 ended abruptly")
    peers = [peer(0, gone=99.0, lost=because), peer(2, gone=99.5), peer(3, gone=99.2)]
    found = diagnose_lost_peer(peers, NOW)
    assert found is not None and (found.code, found.rank, found.certain) == ("FXP514", 3, True)


def test_one_that_failed_comes_before_one_that_blames() -> None:
    peers = [
        peer(0, lost=PeerLossNotice("FXP515", 2, "rank 2 has been silent")),
        peer(1, left=ExitNotice("ValueError: no more files"), gone=99.0),
    ]
    found = diagnose_lost_peer(peers, NOW)
    assert found is not None and found.rank == 1 and "ValueError: no more files" in found.why
    found = diagnose_lost_peer(peers[:1], NOW)
    assert found is not None and (found.code, found.rank) == ("FXP515", 2)


def test_one_that_was_killed_for_its_silence_was_silent() -> None:
    """Who killed it had said so before; the end of its connection is seen at the same time."""
    said = PeerLossNotice("FXP515", 1, "rank 1 has been silent for 3.2 s")
    found = diagnose_lost_peer([peer(0, lost=said), peer(1, gone=99.0)], NOW)
    assert found is not None and (found.code, found.rank, found.certain) == ("FXP515", 1, True)
    assert "silent for 3.2 s (reported by rank 0)" in found.why
    found = diagnose_lost_peer([peer(0, lost=said), peer(2, gone=99.0)], NOW)  # another one
    assert found is not None and (found.code, found.rank) == ("FXP514", 2)


def test_one_that_ended_as_it_should_is_none() -> None:
    peers = [peer(1, left=ExitNotice(), gone=99.0)]
    assert diagnose_lost_peer(peers, NOW) is None
    found = diagnose_blocking_peer(peers, 0, 1, NOW)
    assert found is not None and found.code == "FXP514" and "ended normally" in found.why


def test_the_longest_silence() -> None:
    peers = [waits(0, 2, last_message=98.0), waits(2, NO_RANK, last_message=97.0), waits(3, 0)]
    found = diagnose_silent_peer(peers, NOW, 1.5)
    assert found is not None and (found.code, found.rank) == ("FXP515", 2)
    assert found.why.endswith("silent for 3.0 s; its last event: event of 2, 4.0 s ago")
    assert diagnose_silent_peer(peers, NOW, 3.5) is None


@pytest.mark.parametrize("whom", [1, ALL])
def test_the_end_of_a_chain_of_waits(whom: int) -> None:
    """Rank 0 waits for 1, that for 2, that for 3, and 3 does something else."""
    peers = [waits(1, 2), waits(2, 3), waits(3, NO_RANK)]
    found = diagnose_blocking_peer(peers, 0, whom, NOW)
    assert found is not None and (found.code, found.rank) == ("FXP515", 3)


def test_all_wait_for_each_other() -> None:
    assert diagnose_blocking_peer([waits(1, 2), waits(2, 0)], 0, 1, NOW) is None


def test_what_each_did() -> None:
    peers = [waits(1, 2), peer(2, gone=99.0), peer(3, left=ExitNotice("KeyError: 1"))]
    assert describe_peers(peers, NOW).splitlines() == [
        "rank 1: event of 1, 1.0 s ago; has been waiting for rank 2 for 1.0 s",
        "rank 2: ended 1.0 s ago",
        "rank 3: ended: KeyError: 1",
    ]


def test_messages_come_in_pieces() -> None:
    sent = [HeartbeatMessage("x", 0.5, 3, 1.0), ExitNotice("é"), PeerLossNotice("FXP515", 1, "why")]
    stream, buffer, found = b"".join(map(encode_message, sent)), bytearray(), []
    for at in range(len(stream)):
        buffer += stream[at : at + 1]
        found += decode_messages(buffer)
    assert found == sent and not buffer


@pytest.mark.parametrize("what", [b"\xff\xff\xff\xff", b"\x02\0\0\0{}", b"\x01\0\0\0\xff"])
def test_what_no_watch_says_is_refused(what: bytes) -> None:
    with pytest.raises(ValueError):
        list(decode_messages(bytearray(what)))


@pytest.mark.parametrize("ranks", [2, 64, 65, 100, 1000])
def test_partners_have_each_other_and_reach_all(ranks: int) -> None:
    found = [set(partners(rank, ranks)) for rank in range(ranks)]
    assert all(rank in found[other] for rank in range(ranks) for other in found[rank])
    assert max(map(len, found)) <= 63
    reached, new = {0}, {0}
    while new:
        new = set().union(*(found[rank] for rank in new)) - reached
        reached |= new
    assert len(reached) == ranks
