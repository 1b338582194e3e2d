"""The key-value store of a job, where its ranks meet."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from fxpart.environment import Launch
from fxpart.errors import FxpartError, error

_PAUSE = 0.05  # Seconds between attempts.
_PORT_FREE = 5.0  # Seconds for an earlier owner of the store's port to end.
# Stores owned by this process, by address. A port is opened once and until the process ends, as
# other ranks may still use it. Created so that torch's own "env://" finds them, too.
_owned: dict[tuple[str, int], TCPStore] = {}


def open_store(found: Launch, timeout: float) -> Any:
    """Return a client of the job's store; rank 0 owns the store if no launcher does.

    timeout: maximum seconds to connect. Raises FXP516.
    """
    limit = timedelta(seconds=timeout)
    try:
        if found.rank == 0 and not found.keeps_store:
            return _get_own_store(found, limit)
        return TCPStore(
            found.address, found.port, is_master=False, timeout=limit, wait_for_workers=False
        )
    except (RuntimeError, OSError, ValueError) as cause:
        raise rendezvous_error(
            found,
            f"the store at {found.address}:{found.port} is not reachable: {first_line(cause)}",
        ) from cause


def _get_own_store(found: Launch, limit: timedelta) -> Any:
    """Return the job's store in this process; on one host only on loopback, if possible."""
    at = found.address, found.port
    if at not in _owned:
        _owned[at] = _make_store(found, limit)
    return _owned[at]


def _make_store(found: Launch, limit: timedelta) -> TCPStore:
    addresses = {str(info[4][0]) for info in socket.getaddrinfo(found.address, None)}
    if not found.one_machine or not all(a.startswith("127.") or a == "::1" for a in addresses):
        return TCPStore(
            found.address, found.port, is_master=True, timeout=limit, wait_for_workers=False,
            multi_tenant=True,
        )  # fmt: skip
    host = next((a for a in sorted(addresses) if a.startswith("127.")), "::1")
    family = socket.AF_INET6 if host == "::1" else socket.AF_INET
    until = time.monotonic() + _PORT_FREE
    while True:
        try:
            listener = socket.create_server((host, found.port), family=family, backlog=128)
            break
        except OSError:
            if time.monotonic() >= until:
                raise
            time.sleep(_PAUSE)
    return TCPStore(
        host, found.port, is_master=True, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener.detach(), multi_tenant=True,
    )  # fmt: skip


def rendezvous_error(found: Launch, why: str, number: int = 0) -> FxpartError:
    """Return FXP516 for a rank that does not reach the others. number: the generation."""
    where = f"rank {found.rank} of {found.world}"
    return error(
        "FXP516",
        where=f"{where}, generation {number}" if number else where,
        why=why,
        fix="check that every process was started, and that each machine can reach "
        f"{found.address}:{found.port}",
    )


def first_line(cause: BaseException) -> str:
    """Return the first line of an exception's text, or its type's name."""
    return str(cause).splitlines()[0] if str(cause) else type(cause).__name__
