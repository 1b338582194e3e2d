"""Launch of ranks on this host as processes, with torch's elastic agent.

:func:`start` runs ``python -m fxpart ...`` as ranks and returns how they ended; :func:`start_each`
does so for ranks that may end independently. Only the loopback interface is used.
"""

from fxpart.launch.independent_ranks import start_each
from fxpart.launch.job_exit import JobExit, RankFailure
from fxpart.launch.launcher import start
from fxpart.launch.process_status import die_with_parent
from fxpart.launch.rank_processes import RankProcesses

__all__ = ["JobExit", "RankFailure", "RankProcesses", "die_with_parent", "start", "start_each"]
