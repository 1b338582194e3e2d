"""The C library's heap: keep freed memory in a training process, which allocates it again.

By default glibc returns the top of its heap to the system when enough of it is free, and maps large
tensors one by one. A training step frees and allocates the same sizes repeatedly, and each time the
system has to clear the pages again, for all ranks of the host.

glibc also gives threads separate heaps. Threads that receive and reduce for a rank would each keep
the memory of their largest message, which the computing thread could use.
"""

from __future__ import annotations

import ctypes
import sys

from fxpart.environment import is_heap_configured

# mallopt(3): allocations above THRESHOLD are mapped separately (glibc's maximum is 32 MiB), and a
# free top of the heap above TRIM is returned to the system. ARENAS: number of heaps.
_TRIM, _THRESHOLD, _ARENAS = -1, -3, -8
_MOST_THRESHOLD = 32 << 20
_NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let this process keep freed memory; return whether the C library supports it (glibc).

    Each rank calls it when it connects. If the user has set one of mallopt's environment variables,
    nothing changes. :func:`fxpart.profiling.memory.release_free_memory` still returns memory.
    """
    if not sys.platform.startswith("linux") or is_heap_configured():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # Another C library.
        return False
    return all([mallopt(_THRESHOLD, _MOST_THRESHOLD), mallopt(_TRIM, _NEVER), mallopt(_ARENAS, 1)])
