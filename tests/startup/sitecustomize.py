"""Read by Python in every process that a test starts: looks for garbage less often.

torch's import alone makes half a million objects that stay. By its defaults Python looks through
all of them again and again, a sixth of the time of processes that live for seconds.
"""

import gc

gc.set_threshold(50_000, 20, 50)
