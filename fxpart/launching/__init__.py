"""Ranks of this machine as processes: started by torch's elastic agent, and ended with it.

:func:`start` runs ``python -m fxpart ...`` as so many ranks and says how they ended, and
:func:`start_each` does so where one that ends is missed by nobody. Nothing of it listens on another
interface than the loopback.
"""

from fxpart.launching.each import start_each
from fxpart.launching.ended import Ended, Failed
from fxpart.launching.parent import die_with_parent
from fxpart.launching.running import Running
from fxpart.launching.start import start

__all__ = ["Ended", "Failed", "Running", "die_with_parent", "start", "start_each"]
