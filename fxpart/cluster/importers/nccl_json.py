"""Parse the JSON that nccl-tests write with ``-J FILE`` (versions 1 and 2 of their format)."""

from __future__ import annotations

from typing import Any

from fxpart.cluster.importers.nccl_run import NcclTestRun, describe_run
from fxpart.cluster.importers.source_facts import count, make_import_error, number, parse_json
from fxpart.cluster.validation import MAX_DEVICES


def looks_like(text: str) -> bool:
    """Return whether a text is nccl-tests JSON, judging by its keys."""
    return text.lstrip()[:1] == "{" and '"results"' in text and '"config"' in text


def parse(text: str) -> list[NcclTestRun]:
    """Parse the run; FXP407 names the invalid key."""
    document = _typed(parse_json(text), dict, "the text")
    config = _typed(document.get("config"), dict, "config")
    listed = _typed(config.get("devices"), list, "config.devices")
    devices = [_typed(d, dict, f"config.devices[{i}]") for i, d in enumerate(listed)]
    if not devices:
        raise make_import_error("config.devices", "the list is empty")
    group = min(
        count(d.get("group", 0), f"config.devices[{i}].group") for i, d in enumerate(devices)
    )
    members = [d for d in devices if d.get("group", 0) == group]
    # Each process names its first device only.
    each = count(config.get("nthreads", 1), "config.nthreads")
    each *= count(config.get("ngpus", 1), "config.ngpus")
    if len(members) * each > MAX_DEVICES:
        raise make_import_error("config", f"it describes more than {MAX_DEVICES} ranks")
    rows = _typed(document.get("results"), list, "results")
    times, kinds = [], set()
    for i, row in enumerate(rows):
        row = _typed(row, dict, f"results[{i}]")
        found = _time(row, f"results[{i}]")
        if found is not None:
            times.append(found)
            kinds.add(f"{row.get('type', '')} {row.get('redop', '')}".strip())
    if not times:
        raise make_import_error("results", "there are no times")
    arguments = _typed(document.get("args", []), list, "args")
    program = str(arguments[0]).rpartition("/")[2] if arguments else ""
    if not program and rows:
        program = str(rows[0].get("experiment_name") or "")
    places = tuple(
        (str(d.get("hostname", "")), count(d.get("device", 0), f"config.devices[{i}].device"))
        for i, d in enumerate(members)
    )
    products = tuple(str(d.get("device_info", "")) for d in members)
    return [
        NcclTestRun(
            program=program,
            ranks=len(members) * max(1, each),
            hosts=len({host for host, _ in places}),
            times=tuple(times),
            where="the text",
            source=describe_run(program, products, kinds, _version(document.get("nccl_version"))),
            places=tuple((host, at + i) for host, at in places for i in range(each)),
            products=tuple(product for product in products for _ in range(each)),
        )
    ]


def _time(row: dict[str, Any], where: str) -> tuple[int, float] | None:
    """Return (size, seconds) of a row, None if nothing was sent."""
    size = count(row.get("size"), f"{where}.size")
    timing = row.get("out_of_place") or row.get("in_place")
    timing = _typed(timing, dict, f"{where}.out_of_place")
    key = "time" if "time" in timing else "cpu_time"
    microseconds = number(timing.get(key), f"{where}.out_of_place.{key}")
    if not size:
        return None
    if microseconds <= 0:
        raise make_import_error(
            f"{where}.out_of_place.{key}", f"{size} bytes in {microseconds:g} us is not possible"
        )
    return size, microseconds * 1e-6


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind):
        raise make_import_error(where, f"it is not {'an object' if kind is dict else 'a list'}")
    return value


def _version(code: Any) -> str:
    """Return the NCCL version of a code: 22803 is 2.28.3."""
    if type(code) is not int or not 10000 <= code < 10**8:
        return ""
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
