"""Ranks of this machine as processes: started by torch's elastic agent, and ended with it.

:func:`start` runs ``python -m fxpart ...`` as so many ranks and says how they ended, and
:func:`start_each` does so where one that ends is missed by nobody. Nothing of it listens on another
interface than the loopback.
"""

from fxpart.launch.independent_ranks import start_each
from fxpart.launch.job_exit import JobExit, RankFailure
from fxpart.launch.launcher import start
from fxpart.launch.parent_death_signal import die_with_parent
from fxpart.launch.rank_processes import RankProcesses

__all__ = ["JobExit", "RankFailure", "RankProcesses", "die_with_parent", "start", "start_each"]
