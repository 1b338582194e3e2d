"""A recommender with large tables on a fast rank and two slow ones, beside one kind alone.

    python tests/benchmarks/heterogeneous_tables.py    (as root on Linux)

As heterogeneous_measured.py, whose options it has. The fast rank stands for an accelerator and the
slow ones for hosts: quotas of a core make their speeds, so that all ops differ by the same factor.
In the first cluster the tables do not fit the fast rank's memory, so that it cannot train alone;
in the second it can.
"""

from __future__ import annotations

from heterogeneous_clusters import TABLE_CLUSTERS
from heterogeneous_measured import figures
from record import write

if __name__ == "__main__":
    write("heterogeneous_tables", *figures(__doc__, ("tables",), tuple(TABLE_CLUSTERS)))
