"""Who is to blame: from what is known of all other ranks, the one that the job ended with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpart.collectives.failures import NOBODY
from fxpart.errors import CODES
from fxpart.runtime.heartbeat.call_tracker import TrainerCallTracker
from fxpart.runtime.heartbeat.monitored_peer import MonitoredPeer


@dataclass(frozen=True)
class PeerDiagnosis:
    """A rank was lost (FXP514) or does not answer (FXP515), and why that is said.

    Other codes: it made another call than this rank (FXP501), or its call raised an exception.
    certain: its process is gone, so that nothing is left to wait for.
    """

    code: str
    rank: int
    why: str
    certain: bool = False


def diagnose_lost_peer(peers: Iterable[MonitoredPeer], now: float) -> PeerDiagnosis | None:
    """The first that is gone without a word, or whose word was that it failed, or blamed another.

    One that ended as it should is none: the job may be over for it. Of one that another found
    silent, and killed for it, the other's word is the reason: it was sent before the kill.
    """
    found = [peer for peer in peers if peer.gone is not None or peer.left or peer.lost]
    for peer in sorted(found, key=lambda peer: peer.gone or now):
        if peer.gone is not None and peer.left is None and peer.lost is None:
            killed = _killed_for_silence(peer, found)
            if killed is not None:
                return killed
            why = f"{name(peer)} ended without a word{_last(peer, now)}"
            return PeerDiagnosis("FXP514", peer.rank, why, certain=True)
    for peer in found:
        if peer.left is not None and peer.left.why:
            return PeerDiagnosis("FXP514", peer.rank, f"{name(peer)} ended: {peer.left.why}")
    for peer in found:
        if peer.lost is not None:
            why = f"{peer.lost.why} (rank {peer.rank} says so)"
            code = peer.lost.code if peer.lost.code in CODES else "FXP514"
            return PeerDiagnosis(code, peer.lost.rank, why)
    return None


def _killed_for_silence(
    gone: MonitoredPeer, peers: Iterable[MonitoredPeer]
) -> PeerDiagnosis | None:
    for peer in peers:
        said = peer.lost
        if said is not None and said.rank == gone.rank and said.code == "FXP515":
            return PeerDiagnosis(
                said.code, said.rank, f"{said.why} (rank {peer.rank} says so)", True
            )
    return None


def diagnose_silent_peer(
    peers: Iterable[MonitoredPeer], now: float, limit: float, busy: float | None = None
) -> PeerDiagnosis | None:
    """The rank that has been silent for longest, if that is longer than ``limit`` seconds.

    busy: the limit for one whose process is known to run, by default the same.
    """
    most = limit if busy is None else busy
    found = [
        peer
        for peer in peers
        if peer.gone is None
        and now - peer.heard > limit
        and (now - peer.alive > limit or now - peer.heard > most)
    ]
    if not found:
        return None
    peer = min(found, key=lambda peer: peer.heard)
    why = f"{name(peer)} has been silent for {now - peer.heard:.1f} s{_last(peer, now)}"
    return PeerDiagnosis("FXP515", peer.rank, why)


def diagnose_blocking_peer(
    peers: Sequence[MonitoredPeer], me: int, waits: int, now: float
) -> PeerDiagnosis | None:
    """Where everybody is heard of: the rank that the others wait for, and that waits for none.

    Followed from the one that this rank waits for.
    """
    known = {peer.rank: peer for peer in peers}
    seen = {me}
    while waits in known and waits not in seen:
        peer = known[waits]
        if peer.left is not None:
            why = f"{name(peer)} had ended as it should, while others waited for it"
            return PeerDiagnosis("FXP514", peer.rank, why)
        if peer.beat.waits == NOBODY:
            return _idle(peer, now)
        seen.add(waits)
        waits = peer.beat.waits
    left = [peer for peer in peers if peer.left is not None]
    idle = left or [peer for peer in peers if peer.gone is None and peer.beat.waits == NOBODY]
    if len(idle) != 1:
        return None
    if left:
        return PeerDiagnosis("FXP514", left[0].rank, f"{name(left[0])} had ended as it should")
    return _idle(idle[0], now)


def _idle(peer: MonitoredPeer, now: float) -> PeerDiagnosis:
    why = f"{name(peer)} holds up the others{_last(peer, now)}"
    return PeerDiagnosis("FXP515", peer.rank, why)


def diagnose_diverged_call(
    peers: Iterable[MonitoredPeer], mine: TrainerCallTracker
) -> PeerDiagnosis | None:
    """Why this rank, which waits in a trainer call, waits for ever: another rank is elsewhere.

    Either that rank is in another call, though it has made as many, or its call has raised an
    exception of which the other ranks cannot know.
    """
    for peer in peers:
        beat = peer.beat
        if peer.gone is not None or not mine.name:
            continue
        failed = beat.failed if beat.failed == beat.number and not beat.call else 0
        if failed and mine.failed != failed <= mine.number:
            code = beat.code if beat.code in CODES else "FXP507"
            return PeerDiagnosis(code, peer.rank, f"{name(peer)} raised {beat.problem}")
        if beat.call and beat.number == mine.number and beat.call != mine.name:
            why = f"{name(peer)} called {beat.call}() while this rank called {mine.name}()"
            return PeerDiagnosis("FXP501", peer.rank, why)
    return None


def describe_peers(peers: Iterable[MonitoredPeer], now: float) -> str:
    """What each other rank did last, a line for each."""
    return "\n".join(f"rank {peer.rank}: {_did(peer, now)}" for peer in peers)


def name(peer: MonitoredPeer) -> str:
    """For a message."""
    return f"rank {peer.rank} (process {peer.person.pid})"


def _did(peer: MonitoredPeer, now: float) -> str:
    beat, parts = peer.beat, []
    since = now - peer.heard
    if beat.event:
        parts.append(f"{beat.event}, {beat.ago + since:.1f} s ago")
    if beat.waits != NOBODY and peer.gone is None:
        whom = f"rank {beat.waits}" if beat.waits >= 0 else "all ranks"
        parts.append(f"has waited for {whom} for {beat.waited + since:.1f} s")
    if peer.left is not None:
        parts.append("ended" + (f": {peer.left.why}" if peer.left.why else " as it should"))
    elif peer.lost is not None:
        parts.append(f"gave up because of rank {peer.lost.rank}")
    elif peer.gone is not None:
        parts.append(f"gone {now - peer.gone:.1f} s ago")
    return "; ".join(parts) or "no event yet"


def _last(peer: MonitoredPeer, now: float) -> str:
    if not peer.beat.event:
        return ""
    ago = peer.beat.ago + now - peer.heard
    return f"; its last event: {peer.beat.event}, {ago:.1f} s ago"
