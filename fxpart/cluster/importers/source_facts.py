"""What importers share: the facts that a text lacks, what was found, and how a fault is told."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fxpart.errors import FxpartError, error, quoted

if TYPE_CHECKING:
    from fxpart.cluster.devices import Link
    from fxpart.cluster.model import Cluster

MAX_TEXT = 64 << 20
_MOST = 1 << 62  # whole numbers below it
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# What mpirun --tag-output and srun --label write before each line.
_LABEL = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:? ?|\d+: )")


@dataclass(frozen=True)
class ImportOptions:
    """What a person adds to a text, because the text does not say it.

    into: the cluster whose devices the text is about. device: the model of all devices, by the
    name of its data file. per_host: devices on each host. hosts: those of ``into`` that the text
    holds for. pcie, nvlink, network, memory: bytes/s of PCIe in one direction, of one NVLink lane
    in one direction, between hosts, of the devices' memory. network_latency: seconds. operation:
    the collective that a table is of.
    """

    into: Cluster | None = None
    device: str | None = None
    per_host: int | None = None
    hosts: tuple[str, ...] = ()
    pcie: float | None = None
    nvlink: float | None = None
    network: float | None = None
    network_latency: float = 0.0
    memory: float | None = None
    operation: str | None = None


@dataclass(frozen=True)
class ImportedCluster:
    """A cluster that was read, and what a person should know about how."""

    cluster: Cluster
    notes: tuple[str, ...] = ()


def make_import_error(where: str, why: str, fix: str = "") -> FxpartError:
    """An FXP407, to be raised by the caller."""
    fix = fix or "compare the text with what the tool prints; see `fxpart cluster import --help`"
    return error("FXP407", where=where[:200], why=why[:400], fix=fix)


def format_location(number: int, line: str) -> str:
    """The place of a line, counted from 1, with its text."""
    return f"line {number}: {line.strip()[:120]!r}"


def lines(text: str) -> list[str]:
    """The lines of a text, without colours and without the labels of mpirun and srun."""
    return [_LABEL.sub("", line) for line in _COLOUR.sub("", text).splitlines()]


def parse_json(text: str) -> Any:
    """What the JSON says; FXP407 with the line where it is none."""
    try:
        return json.loads(text, parse_constant=_constant)
    except json.JSONDecodeError as why:
        raise make_import_error(
            f"line {why.lineno}, column {why.colno}", f"no JSON: {why.msg}"
        ) from why
    except (ValueError, RecursionError) as why:
        raise make_import_error("the text", f"no JSON: {why}") from why


def number(value: Any, where: str) -> float:
    """A number, or a text that holds one, finite; FXP407."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        found = float(value)
    except (ValueError, OverflowError):
        raise make_import_error(where, f"{quoted(value)} is no number") from None
    if found - found != 0:
        raise make_import_error(where, f"{found} is no finite number")
    return found


def count(value: Any, where: str) -> int:
    """A count or size: a number without a fraction, or a text of one; FXP407."""
    found = number(value, where)
    if not 0 <= found < _MOST or found != int(found):
        raise make_import_error(where, f"{quoted(value)} is no count")
    return int(found)


def scaled(value: Any, factor: float, where: str) -> float:
    """A number times ``factor``, finite; FXP407."""
    return number(number(value, where) * factor, where)


def device_model(facts: ImportOptions, why: str) -> dict[str, Any]:
    """The data of the model that was given; FXP407 with ``why`` where none was."""
    from fxpart.cluster.presets import device_data, models

    if facts.device is None:
        fix = f"--device MODEL, one of {', '.join(models())};\nor --into CLUSTER, which has them"
        raise make_import_error("--device", why, fix)
    return device_data(facts.device)


def validate_imported(cluster: Cluster, what: str) -> Cluster:
    """The cluster; FXP407 naming each fault where what was read makes none."""
    problems = cluster.problems()
    if problems:
        listed = "; ".join(f"{problem.where}: {problem.why}" for problem in problems[:5])
        raise make_import_error(what, f"it makes no valid cluster: {listed}")
    return cluster


def network(facts: ImportOptions) -> tuple[Link, ...]:
    """The link between hosts as it was given; () where it was not."""
    from fxpart.cluster.devices import Link

    if facts.network is None:
        return ()
    return (
        Link(
            source="*",
            target="*",
            latency=facts.network_latency,
            bandwidth=facts.network,
            kind="net",
            origin="given on the command line",
        ),
    )


NO_NETWORK = (
    "how fast the hosts reach each other is not known, so there is no link between them; "
    "measure it or give --network-gbs"
)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no number")
