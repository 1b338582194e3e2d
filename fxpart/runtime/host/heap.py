"""The C library's heap: freed memory stays with a process that trains, which wants it again.

By default glibc returns the top of its heap to the system whenever enough of it is free, and takes
large tensors from the system one by one. A training step frees and wants the same memory over and
over; each time the system has to clear its pages again, for all ranks of the host.

And it gives threads heaps of their own. Those that receive and sum for a rank would each keep what
the largest message took, which the one that computes could use.
"""

from __future__ import annotations

import ctypes
import sys

from fxpart.environment import heap_is_set

# mallopt(3): what is larger than THRESHOLD comes from the system by itself (32 MiB is the most that
# glibc takes), and a free top of the heap larger than TRIM goes back to it. ARENAS: heaps.
_TRIM, _THRESHOLD, _ARENAS = -1, -3, -8
_MOST_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep what it frees; whether the C library can be told so (glibc).

    Said by each rank when it joins the others. Where the user's environment sets one of mallopt's
    variables, that stays. What :func:`fxpart.profiling.memory.release_free_memory` returns is
    returned.
    """
    if not sys.platform.startswith("linux") or heap_is_set():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    return all([mallopt(_THRESHOLD, _MOST_THRESHOLD), mallopt(_TRIM, _NEVER), mallopt(_ARENAS, 1)])
