"""Each rank watches the others: who is gone, who is silent, and what each did last.

Only in a job that a launcher supervises (torchrun, ``fxpart train --nproc``). Everywhere else there
is no watch, no thread and no connection, and all functions here do nothing.
"""

from fxpart.runtime.watch.current import current, ended_by, failure, last_words, tell, watched
from fxpart.runtime.watch.joining import by_store, join
from fxpart.runtime.watch.verdict import Verdict
from fxpart.runtime.watch.watch import Watch

__all__ = [
    "Verdict", "Watch", "by_store", "current", "ended_by", "failure", "join", "last_words", "tell",
    "watched",
]  # fmt: skip
