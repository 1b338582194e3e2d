"""The best chain: a good start from a few orders, then the proof over all ideals."""

from __future__ import annotations

from math import inf

from .blocks import Blocks, make_blocks
from .bounds import cheap_bound
from .dp import StageProgramme
from .ideals import Ideals, all_ideals, prefixes, walk
from .record import MaxLoadRecord
from .reduce import reduce
from .watch import MaxLoadWatch

_HAIR = 1e-10  # relative: only what is better by so much is looked for
_STEPS = (1.02, 1.1, 1.3, 2.0, inf)  # times the bound: loads tried for a start, the least first
_ROUNDS = 4  # of a better start and fewer blocks
_MOST_IDEALS = 60_000


def start(record: MaxLoadRecord, watch: MaxLoadWatch, seed: int) -> Blocks:
    """Add a first chain to ``record`` where one is found; the instance as few blocks."""
    blocks = reduce(make_blocks(record.instance, "chain"))
    if record.mode == "chain":
        record.prove(cheap_bound(blocks))
    for factor in _STEPS:
        found = first_fit(blocks, cheap_bound(blocks) * factor)
        if found is not None:
            record.add(blocks.assignment(found))
    for _ in range(_ROUNDS):
        before = len(blocks), record.objective
        _try_orders(blocks, record, watch, seed)
        blocks = reduce(blocks, record.objective)
        if before in ((len(blocks), record.objective), (1, inf)) or record.closed:
            break
    return blocks


def first_fit(blocks: Blocks, load: float) -> list[int] | None:
    """A device for each block: along one order, the next device where one is full, or None.

    Quick, so that there is an answer however short the time is. Accelerators first; a CPU core
    where no accelerator is left, or none runs the block.
    """
    accelerators = iter(range(blocks.accelerators))
    cores = iter(range(blocks.accelerators, blocks.accelerators + blocks.cpus))
    found, device, work, size = [0] * len(blocks), -1, 0.0, 0.0
    for b in walk(blocks):
        fits = bool(blocks.runs[b]) and float(blocks.size[b]) <= blocks.memory
        on_core = device >= blocks.accelerators
        own = float((blocks.cpu if on_core else blocks.work)[b])
        full = work + own > load or (not on_core and size + float(blocks.size[b]) > blocks.memory)
        if device < 0 or full or not (fits or on_core):
            following = next(accelerators, None) if fits else None
            following = next(cores, None) if following is None else following
            if following is not None:
                device, work, size = following, 0.0, 0.0
        if device < 0 or (device < blocks.accelerators and not fits):
            return None
        work, size = work + own, size + float(blocks.size[b])
        found[b] = device
    return found


def _try_orders(blocks: Blocks, record: MaxLoadRecord, watch: MaxLoadWatch, seed: int) -> None:
    ideals = Ideals(blocks, prefixes(blocks, seed, watch), watch)
    bound = cheap_bound(blocks)
    for factor in _STEPS:
        most = min(bound * factor if bound > 0 else inf, record.objective * (1 - _HAIR))
        if search(blocks, ideals, record, watch, most) or most >= record.objective * (1 - _HAIR):
            return


def search(
    blocks: Blocks, ideals: Ideals, record: MaxLoadRecord, watch: MaxLoadWatch, most: float
) -> bool:
    """Add the best chain over these ideals with loads up to ``most``; whether there is one."""
    programme = StageProgramme(blocks, ideals, most)
    if programme.run(watch) == inf:
        return False
    record.add(blocks.assignment(programme.devices()))
    return True


def prove_by_ideals(blocks: Blocks, record: MaxLoadRecord, watch: MaxLoadWatch) -> bool:
    """Find and prove the optimum; False, and nothing proven, where there are too many ideals."""
    masks = all_ideals(blocks, _MOST_IDEALS, watch)
    if masks is None:
        return False
    known = record.objective
    if search(blocks, Ideals(blocks, masks, watch), record, watch, known * (1 - _HAIR)):
        # the programme's own sums may differ from the objective's by rounding
        record.prove(record.objective * (1 - _HAIR))
    else:
        record.prove(known * (1 - _HAIR) if known < inf else inf)
    return True
