"""Processes in network namespaces of their own, joined by a switch over shaped links. Linux, root.

Imported by slow_links.py, not run. Each process has one interface with an address of its own, and
no other way to the rest: no loopback in common, no Unix socket of another namespace. Both ends of
each link pass through tc's token bucket, so that what a process sends and what it is sent are both
limited to the rate.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PREFIX = "fxslow"
DEVICE = "wire"  # the name of each process's interface
PORT = 29500
_NUMBERS = itertools.count()  # of this process's networks
_DELAY = "100ms"  # how long a packet may stand before the bucket


def missing() -> str:
    """What this machine lacks for it, in words; "" where nothing."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (iproute2)"
    name = f"{PREFIX}-{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "add", "dev", "one", "type", "veth", "peer", "name", "two")
        _run("ip", "-n", name, "link", "add", "dev", "three", "type", "bridge")
        _run("tc", "-n", name, *_bucket("one", 100.0))
    except RuntimeError as cause:
        return str(cause)
    finally:
        _remove(name)
    return ""


class Network:
    """So many namespaces on one switch; a context, after which nothing of it is left."""

    def __init__(self, count: int) -> None:
        """count: of processes. Leftovers of runs that were killed are removed."""
        sweep()
        own = f"{PREFIX}-{os.getpid()}-{next(_NUMBERS)}"
        self.switch = f"{own}-switch"
        self.names = [f"{own}-{index}" for index in range(count)]
        self.started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make(self) -> None:
        _run("ip", "netns", "add", self.switch)
        _run("ip", "-n", self.switch, "link", "add", "dev", "switch", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "dev", "switch", "up")
        for index, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            _run(
                "ip", "-n", self.switch, "link", "add", "dev", f"port{index}", "type", "veth",
                "peer", "name", DEVICE, "netns", name,
            )  # fmt: skip
            _run(
                "ip",
                "-n",
                self.switch,
                "link",
                "set",
                "dev",
                f"port{index}",
                "master",
                "switch",
                "up",
            )
            _run("ip", "-n", name, "addr", "add", f"{address(index)}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", "dev", DEVICE, "up")
            _run("ip", "-n", name, "link", "set", "dev", "lo", "up")

    def shape(self, megabits: float) -> None:
        """Limit every link, both ways, to so many Mbit/s; 0: to nothing."""
        ends = [(name, DEVICE) for name in self.names]
        ends += [(self.switch, f"port{index}") for index in range(len(self.names))]
        for name, device in ends:
            subprocess.run(
                ["tc", "-n", name, "qdisc", "del", "dev", device, "root"],
                capture_output=True, check=False,
            )  # fmt: skip
            if megabits:
                _run("tc", "-n", name, *_bucket(device, megabits))

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        """The command in every namespace, each as the only process of a machine of its own."""
        for index, name in enumerate(self.names):
            own = {
                "RANK": str(index), "WORLD_SIZE": str(len(self.names)), "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": DEVICE,
            }  # fmt: skip
            self.started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    env={**os.environ, **variables, **own},
                )
            )

    def wait(self, seconds: float) -> None:
        """Until all have ended; RuntimeError where one fails or the time is over."""
        limit = time.monotonic() + seconds
        while any(process.poll() is None for process in self.started):
            failed = [p.returncode for p in self.started if p.poll()]
            if failed or time.monotonic() > limit:
                why = f"ended with {failed[0]}" if failed else f"not done after {seconds:.0f} s"
                raise RuntimeError(f"a process of the benchmark: {why}")
            time.sleep(0.05)
        failed = [p.returncode for p in self.started if p.returncode]
        if failed:
            raise RuntimeError(f"a process of the benchmark: ended with {failed[0]}")
        self.started.clear()

    def close(self) -> None:
        """End what was started and remove the namespaces; their links go with them."""
        for process in self.started:
            process.kill()
        for process in self.started:
            process.wait()
        self.started.clear()
        for name in (*self.names, self.switch):
            _remove(name)


def address(index: int) -> str:
    """The address of a process; only its own network knows it."""
    return f"10.77.0.{index + 1}"


def sweep() -> None:
    """Remove namespaces of benchmarks that were killed, with what still runs in them."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    for line in found.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        owner = name.removeprefix(f"{PREFIX}-").split("-")[0]
        if name.startswith(f"{PREFIX}-") and owner.isdigit() and not Path("/proc", owner).exists():
            _remove(name)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """A request to terminate ends the block as Ctrl-C does, so that it cleans up."""

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _bucket(device: str, megabits: float) -> list[str]:
    """tc's arguments. The bucket holds what passes in 4 ms, which timers of 250 Hz can keep up."""
    burst = max(32_000, round(megabits * 1e6 / 8 * 0.004))
    rate = f"{megabits:g}mbit"
    limits = ["rate", rate, "burst", str(burst), "latency", _DELAY]
    return ["qdisc", "add", "dev", device, "root", "tbf", *limits]


def _remove(name: str) -> None:
    inside = subprocess.run(
        ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
    )
    for number in inside.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    """Run it; RuntimeError with what it said."""
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)}: {found.stderr.strip() or found.returncode}")
