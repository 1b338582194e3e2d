"""Diagnosis of the rank that caused a failure, from the state of all other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxpart.collectives.failures import NO_RANK
from fxpart.errors import CODES
from fxpart.runtime.heartbeat.call_tracker import TrainerCallTracker
from fxpart.runtime.heartbeat.monitored_peer import MonitoredPeer


@dataclass(frozen=True)
class PeerDiagnosis:
    """A rank was lost (FXP514) or does not answer (FXP515), and why.

    Other codes: it made a different call (FXP501), or its call raised an exception. certain: its
    process has ended, so no further information can arrive.
    """

    code: str
    rank: int
    why: str
    certain: bool = False


def diagnose_lost_peer(peers: Iterable[MonitoredPeer], now: float) -> PeerDiagnosis | None:
    """Diagnose the first rank that ended abruptly, failed, or reported another rank.

    A rank that ended normally is not reported: it may have finished. For a rank that was killed for
    being silent, the notice of the killer, sent before, gives the reason.
    """
    found = [peer for peer in peers if peer.gone is not None or peer.left or peer.lost]
    for peer in sorted(found, key=lambda peer: peer.gone or now):
        if peer.gone is not None and peer.left is None and peer.lost is None:
            killed = _killed_for_silence(peer, found)
            if killed is not None:
                return killed
            why = f"{name(peer)} ended abruptly{_describe_last_event(peer, now)}"
            return PeerDiagnosis("FXP514", peer.rank, why, certain=True)
    for peer in found:
        if peer.left is not None and peer.left.why:
            return PeerDiagnosis("FXP514", peer.rank, f"{name(peer)} ended: {peer.left.why}")
    for peer in found:
        if peer.lost is not None:
            why = f"{peer.lost.why} (reported by rank {peer.rank})"
            code = peer.lost.code if peer.lost.code in CODES else "FXP514"
            return PeerDiagnosis(code, peer.lost.rank, why)
    return None


def _killed_for_silence(
    gone: MonitoredPeer, peers: Iterable[MonitoredPeer]
) -> PeerDiagnosis | None:
    for peer in peers:
        notice = peer.lost
        if notice is not None and notice.rank == gone.rank and notice.code == "FXP515":
            return PeerDiagnosis(
                notice.code, notice.rank, f"{notice.why} (reported by rank {peer.rank})", True
            )
    return None


def diagnose_silent_peer(
    peers: Iterable[MonitoredPeer], now: float, limit: float, busy: float | None = None
) -> PeerDiagnosis | None:
    """Diagnose the rank that has been silent longest, if longer than ``limit`` seconds.

    busy: limit for a rank whose process is known to run; ``limit`` by default.
    """
    busy_limit = limit if busy is None else busy
    found = [
        peer
        for peer in peers
        if peer.gone is None
        and now - peer.last_message > limit
        and (now - peer.alive > limit or now - peer.last_message > busy_limit)
    ]
    if not found:
        return None
    peer = min(found, key=lambda peer: peer.last_message)
    why = f"{name(peer)} has been silent for {now - peer.last_message:.1f} s"
    why += f"{_describe_last_event(peer, now)}"
    return PeerDiagnosis("FXP515", peer.rank, why)


def diagnose_blocking_peer(
    peers: Sequence[MonitoredPeer], me: int, waits: int, now: float
) -> PeerDiagnosis | None:
    """Diagnose the rank that others wait for and that waits for none, if all ranks respond.

    Follows the chain of waits from the rank that this rank waits for.
    """
    known = {peer.rank: peer for peer in peers}
    seen = {me}
    while waits in known and waits not in seen:
        peer = known[waits]
        if peer.left is not None:
            why = f"{name(peer)} had ended normally while others waited for it"
            return PeerDiagnosis("FXP514", peer.rank, why)
        if peer.beat.waits == NO_RANK:
            return _diagnose_blocker(peer, now)
        seen.add(waits)
        waits = peer.beat.waits
    left = [peer for peer in peers if peer.left is not None]
    not_waiting = left or [
        peer for peer in peers if peer.gone is None and peer.beat.waits == NO_RANK
    ]
    if len(not_waiting) != 1:
        return None
    if left:
        return PeerDiagnosis("FXP514", left[0].rank, f"{name(left[0])} had ended normally")
    return _diagnose_blocker(not_waiting[0], now)


def _diagnose_blocker(peer: MonitoredPeer, now: float) -> PeerDiagnosis:
    why = f"{name(peer)} blocks the others{_describe_last_event(peer, now)}"
    return PeerDiagnosis("FXP515", peer.rank, why)


def diagnose_diverged_call(
    peers: Iterable[MonitoredPeer], mine: TrainerCallTracker
) -> PeerDiagnosis | None:
    """Diagnose why this rank would wait forever in a trainer call.

    Another rank has made as many calls but is in a different one, or its call has raised an
    exception that the other ranks do not know.
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
    """Describe the last event of each rank, one line each."""
    return "\n".join(f"rank {peer.rank}: {_describe_state(peer, now)}" for peer in peers)


def name(peer: MonitoredPeer) -> str:
    """Return the name of a rank for messages."""
    return f"rank {peer.rank} (process {peer.person.pid})"


def _describe_state(peer: MonitoredPeer, now: float) -> str:
    beat, parts = peer.beat, []
    since = now - peer.last_message
    if beat.event:
        parts.append(f"{beat.event}, {beat.ago + since:.1f} s ago")
    if beat.waits != NO_RANK and peer.gone is None:
        target = f"rank {beat.waits}" if beat.waits >= 0 else "all ranks"
        parts.append(f"has been waiting for {target} for {beat.waited + since:.1f} s")
    if peer.left is not None:
        parts.append("ended" + (f": {peer.left.why}" if peer.left.why else " normally"))
    elif peer.lost is not None:
        parts.append(f"gave up because of rank {peer.lost.rank}")
    elif peer.gone is not None:
        parts.append(f"ended {now - peer.gone:.1f} s ago")
    return "; ".join(parts) or "no event yet"


def _describe_last_event(peer: MonitoredPeer, now: float) -> str:
    if not peer.beat.event:
        return ""
    ago = peer.beat.ago + now - peer.last_message
    return f"; its last event: {peer.beat.event}, {ago:.1f} s ago"
