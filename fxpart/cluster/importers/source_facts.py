"""Shared parts of importers: options, results, errors and parsing of values."""

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
_MOST = 1 << 62  # Exclusive bound of counts.
_ANSI_CODE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
# Line prefixes of mpirun --tag-output and srun --label.
_LABEL = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:? ?|\d+: )")


@dataclass(frozen=True)
class ImportOptions:
    """User options that complete an imported text.

    into: cluster with the devices that the text describes. device: model of all devices. per_host:
    devices on each host. hosts: hosts of ``into`` that the text describes. pcie, nvlink, network,
    memory: bytes/s of PCIe in one direction, of one NVLink in one direction, between hosts, and of
    device memory. network_latency: seconds. operation: collective of a table of measurements.
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
    """An imported cluster, with notes about assumptions."""

    cluster: Cluster
    notes: tuple[str, ...] = ()


def make_import_error(where: str, why: str, fix: str = "") -> FxpartError:
    """Return an FXP407 for the caller to raise."""
    fix = fix or "compare the text with the tool's output; see `fxpart cluster import --help`"
    return error("FXP407", where=where[:200], why=why[:400], fix=fix)


def format_location(number: int, line: str) -> str:
    """Return the location of a line: its number, from 1, and its text."""
    return f"line {number}: {line.strip()[:120]!r}"


def lines(text: str) -> list[str]:
    """Return the lines of a text without ANSI codes and labels of mpirun and srun."""
    return [_LABEL.sub("", line) for line in _ANSI_CODE.sub("", text).splitlines()]


def parse_json(text: str) -> Any:
    """Parse JSON; FXP407 names the line of an error."""
    try:
        return json.loads(text, parse_constant=_constant)
    except json.JSONDecodeError as why:
        raise make_import_error(
            f"line {why.lineno}, column {why.colno}", f"not valid JSON: {why.msg}"
        ) from why
    except (ValueError, RecursionError) as why:
        raise make_import_error("the text", f"not valid JSON: {why}") from why


def number(value: Any, where: str) -> float:
    """Return a finite number, given as a number or a text; FXP407 if it is not valid."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        found = float(value)
    except (ValueError, OverflowError):
        raise make_import_error(where, f"{quoted(value)} is not a number") from None
    if found - found != 0:
        raise make_import_error(where, f"{found} is not a finite number")
    return found


def count(value: Any, where: str) -> int:
    """Return a count or size, given as a whole number or a text; FXP407 if it is not valid."""
    found = number(value, where)
    if not 0 <= found < _MOST or found != int(found):
        raise make_import_error(where, f"{quoted(value)} is not a count")
    return int(found)


def scaled(value: Any, factor: float, where: str) -> float:
    """Return a number times ``factor``; FXP407 if it is not finite."""
    return number(number(value, where) * factor, where)


def device_model(facts: ImportOptions, why: str) -> dict[str, Any]:
    """Return the data of the device model; FXP407 with ``why`` if none is given."""
    from fxpart.cluster.presets import device_data, models

    if facts.device is None:
        fix = f"pass --device MODEL, one of {', '.join(models())};\n"
        fix += "or --into CLUSTER with a cluster of these devices"
        raise make_import_error("--device", why, fix)
    return device_data(facts.device)


def validate_imported(cluster: Cluster, what: str) -> Cluster:
    """Return the cluster; FXP407 lists the problems if it is not valid."""
    problems = cluster.problems()
    if problems:
        listed = "; ".join(f"{problem.where}: {problem.why}" for problem in problems[:5])
        raise make_import_error(what, f"the resulting cluster is not valid: {listed}")
    return cluster


def network(facts: ImportOptions) -> tuple[Link, ...]:
    """Return the link between hosts; () if its speed is not given."""
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
    "the speed between hosts is unknown, so the cluster has no link between them; "
    "measure it or pass --network-gbs"
)


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")
