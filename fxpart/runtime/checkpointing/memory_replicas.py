"""The last checkpoints in memory too, on two machines: a machine that is lost takes nothing along.

After a save each rank copies its file into its own machine's memory and sends it to a rank of the
next machine, in a ring. At a restart the machines that are left tell each other what they hold, and
bring each other the files that they lack: no disk is read.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from fxpart.checkpoint import files
from fxpart.checkpoint.manifest import NAME, CheckpointManifest
from fxpart.checkpoint.run_directory import RunDir
from fxpart.environment import Launch, read_launch
from fxpart.errors import FxpartError, error
from fxpart.runtime.checkpointing.file_transfer import (
    Peers,
    connect_ranks,
    receive_file,
    send_file,
)
from fxpart.runtime.checkpointing.memory_store import (
    MemoryCheckpointStore,
    default_root,
    folder_name,
    step_of,
)
from fxpart.runtime.checkpointing.replica_selection import (
    CheckpointMemoryInventory,
    ReplicaTransfer,
    select_checkpoint,
)
from fxpart.runtime.transport.agreement import agree, convert_transport_errors
from fxpart.runtime.transport.handshake import LoopbackSockets, NetworkSockets, SocketKind
from fxpart.runtime.transport.interface import Transport

_PATIENCE = 60.0


class _ProcessIdentity(msgspec.Struct, frozen=True):
    """What a process says of itself. run: the run's identity, of rank 0."""

    host: str
    run: str = ""


class CheckpointReplicas:
    """Copies of a run's checkpoints in memory, kept by all ranks together.

    problems: what went wrong; training goes on without copies then. kept: the newest step whose
    files of this process are in memory here and on the partner's machine, -1 before the first.
    """

    def __init__(
        self,
        root: Path,
        host: str,
        hosts: Sequence[str],
        transport: Transport,
        *,
        kind: SocketKind | None = None,
        patience: float = _PATIENCE,
    ) -> None:
        """Every rank makes one, at the same time.

        root: this run's folder in this machine's memory. host: the name of this machine; hosts: of
        every rank's. kind: how machines connect; by default over the loopback interface. patience:
        seconds without progress after which a partner is given up.
        """
        self.problems: list[FxpartError] = []
        self.kept = -1
        self._transport = transport
        self._host = host
        self._hosts = tuple(hosts)
        self._kind = kind or LoopbackSockets()
        self._patience = patience
        self._root = root
        self._memory: MemoryCheckpointStore | None = None
        try:
            self._memory = MemoryCheckpointStore(root)
        except OSError as cause:
            self._note(str(root), cause)
        to, of = self._pairs()
        self._out: Peers = {}
        self._into: Peers = {}
        if len(set(self._hosts)) > 1:
            self._connect(to, of)

    @classmethod
    def of(
        cls, run: RunDir, transport: Transport, *, host: str | None = None, root: Path | None = None
    ) -> CheckpointReplicas:
        """Those of a run; every rank calls it.

        host, root: instead of this machine's own; another root alone is as another machine.
        """
        own = _machine() if root is None else f"{_machine()} {root}"
        name = own if host is None else host
        identity = agree(
            transport, "the run's identity",
            lambda: (_identity(run) if 0 in transport.local else "", ""),
        )  # fmt: skip
        with convert_transport_errors(transport, "sharing the machines' names"):
            told = transport.exchange_bytes(msgspec.json.encode(_ProcessIdentity(name, identity)))
        here = [msgspec.json.decode(each, type=_ProcessIdentity) for each in told]
        hosts = [each.host for each in here]
        if len(hosts) < transport.ranks:  # one process holds all ranks
            hosts *= transport.ranks
        place = default_root(here[0].run) if root is None else root
        return cls(place, name, hosts, transport, kind=_kind(read_launch()))

    # -- after a save ---------------------------------------------------------------------------

    def keep(self, step: int, folder: Path, manifest: CheckpointManifest) -> None:
        """Copy this process's files of a complete checkpoint; what fails is in :attr:`problems`.

        Each rank calls it for the same checkpoints in the same order, and begins the next only
        when all have ended this one (as a Saver does): the one before is kept until then. Returns
        when the partner has the files.
        """
        if self._memory is None:
            return
        try:
            text = (folder / NAME).read_bytes()
            where = folder_name(step, text)
            names = [n for n in manifest.files if n in self._mine()]
            if self._leads:
                names += [n for n in manifest.files if not n.startswith("rank-")] + [NAME]
            self._drop(where)
            for name in names:  # the manifest last: where it is, this machine's files are
                path = self._memory.copy(folder / name, where)
                for rank in self._out:
                    self._send(rank, where, path)
            if self._out or len(set(self._hosts)) == 1:
                self.kept = step
        except (OSError, ValueError) as cause:
            self._note(f"step {step}", cause)

    def gather(self, at_least: int = -1, tried: Collection[str] = ()) -> Path | None:
        """Have the newest checkpoint whose files are all in some machine's memory, in this one's.

        Its folder, the same step's on every rank; None on all where there is none from the step
        ``at_least`` on but those tried. Every rank calls it, and no save may be under way. What is
        in the files is compared when they are read.
        """
        told = self._tell() if self._leads else b""
        with convert_transport_errors(self._transport, "looking for checkpoints in memory"):
            raw = self._transport.exchange_bytes(told)
        machines = {
            self._hosts[rank]: msgspec.json.decode(text, type=CheckpointMemoryInventory)
            for rank, text in enumerate(raw)
            if text
        }
        found = select_checkpoint(machines, at_least, tried)
        if found is None:
            return None
        where, moves = found
        done = self._bring(where, moves) if moves else True
        with convert_transport_errors(self._transport, "bringing checkpoints over"):
            if not all(self._transport.exchange_bytes(b"\1" if done else b"")):
                return None
        return self._root / where

    def close(self) -> None:
        """End the connections; what is in memory stays."""
        for peer in (*self._out.values(), *self._into.values()):
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._out, self._into = {}, {}

    def remove(self) -> None:
        """Give the memory of this machine back: the run is over."""
        if self._memory is not None and self._leads:
            self._memory.remove()

    # -- inner ----------------------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        """Whether this process is the first of its machine."""
        return self._hosts.index(self._host) in self._transport.local

    def _leaders(self) -> dict[str, int]:
        return {host: self._hosts.index(host) for host in dict.fromkeys(self._hosts)}

    def _mine(self) -> set[str]:
        return {f"rank-{rank:05d}.safetensors" for rank in self._transport.local}

    def _pairs(self) -> tuple[list[int], list[int]]:
        """The rank that this one sends to, and those that send to it: of machines in a ring."""
        order = list(dict.fromkeys(self._hosts))
        ranks = {host: [r for r, h in enumerate(self._hosts) if h == host] for host in order}
        partner = {}
        for place, host in enumerate(order):
            others = ranks[order[(place + 1) % len(order)]]
            for index, rank in enumerate(ranks[host]):
                partner[rank] = others[index % len(others)]
        me = self._transport.local[0]
        return [partner[me]], [rank for rank, other in partner.items() if other == me]

    def _connect(self, to: list[int], of: list[int]) -> None:
        with convert_transport_errors(self._transport, "connecting to partners"):
            made = connect_ranks(
                self._transport.local[0], self._transport.exchange_bytes, self._kind, to, of
            )
        if made is None:
            self._note("partners", OSError(0, "not every rank reaches its partner's machine"))
            return
        self._out, self._into = made
        for rank, peer in self._into.items():
            # Of its own: what comes is taken while this rank computes.
            threading.Thread(
                target=self._take, args=(peer,), name=f"copies-of-{rank}", daemon=True
            ).start()

    def _take(self, peer: socket.socket) -> None:
        """Receive until the other end closes; a lost machine is others' to notice."""
        with suppress(OSError, ValueError):
            while receive_file(peer, self._memory, self._patience):
                pass
        peer.close()

    def _send(self, rank: int, where: str, path: Path) -> None:
        """Send one file to the partner; OSError, and where that has failed, no connection more."""
        there = f"rank {rank} on {self._hosts[rank]}"
        try:
            done = send_file(self._out[rank], where, path, self._patience)
        except OSError as cause:
            self._out.pop(rank).close()
            raise OSError(0, f"{there} is not reached: {cause}") from cause
        if not done:
            raise OSError(0, f"{there} cannot keep {path.name}")

    def _drop(self, where: str) -> None:
        """Give back all but this checkpoint and the one before it."""
        assert self._memory is not None
        step = step_of(where)
        before = [name for name in self._memory.held() if step_of(name) < step]
        kept = max(before, key=step_of, default=where)
        same = [n for n in before if step_of(n) == step_of(kept)]
        self._memory.drop({where, *same})

    def _tell(self) -> bytes:
        """What this machine's memory holds."""
        if self._memory is None:
            return msgspec.json.encode(CheckpointMemoryInventory({}, {}, 0))
        held = self._memory.held()
        needed = {}
        for where in held:
            manifest = self._memory.manifest(where)
            if manifest is not None:
                size = held[where][NAME]
                needed[where] = {n: f.size for n, f in manifest.files.items()} | {NAME: size}
        return msgspec.json.encode(CheckpointMemoryInventory(held, needed, self._memory.free))

    def _bring(self, where: str, moves: Sequence[ReplicaTransfer]) -> bool:
        """Send and take what machines lack; whether this one has got all that it should."""
        leaders, me = self._leaders(), self._transport.local[0]
        out = [m for m in moves if leaders[m.source] == me]
        into = [m for m in moves if leaders[m.target] == me]
        to = sorted({leaders[m.target] for m in out})
        of = sorted({leaders[m.source] for m in into})
        made = connect_ranks(me, self._transport.exchange_bytes, self._kind, to, of)
        if made is None:
            return False
        failed: list[BaseException] = []

        def sending(rank: int, peer: socket.socket) -> None:
            try:
                for move in out:
                    if leaders[move.target] == rank:
                        path = self._root / where / move.file
                        if not send_file(peer, where, path, self._patience):
                            raise OSError(0, f"rank {rank} could not keep {move.file}")
            except OSError as cause:
                failed.append(cause)

        def taking(rank: int, peer: socket.socket) -> None:
            try:
                for _ in [move for move in into if leaders[move.source] == rank]:
                    if not receive_file(peer, self._memory, self._patience):
                        raise ConnectionError(f"rank {rank} has closed the connection")
            except (OSError, ValueError) as cause:
                failed.append(cause)

        jobs = [(sending, *pair) for pair in made[0].items()]
        jobs += [(taking, *pair) for pair in made[1].items()]
        threads = [
            threading.Thread(target=do, args=(rank, peer), daemon=True) for do, rank, peer in jobs
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for peer in (*made[0].values(), *made[1].values()):
            peer.close()
        for cause in failed:
            self._note(where, cause)
        return not failed

    def _note(self, where: str, cause: BaseException) -> None:
        why = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        fix = "training goes on; checkpoints on the disk are as they were"
        self.problems.append(error("FXP513", where=f"copies in memory, {where}", why=why, fix=fix))


def _identity(run: RunDir) -> str:
    """A run's own random name, made by who asks first: no other run finds its copies. FXP513."""
    with files.convert_save_errors(str(run.path)):
        run.path.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(run.identity, "x", encoding="ascii") as file:
            file.write(secrets.token_hex(8))
        text = run.identity.read_text("ascii").strip()
    return text if files.is_name(text) and len(text) == 16 else "unknown"


def _machine() -> str:
    """A name of this machine, another one after each boot."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()[:8]
    return f"{socket.gethostname()} {boot}".strip()


def _kind(found: Launch | None) -> SocketKind:
    """The loopback interface on one machine, else the interface by which the store is reached."""
    if found is None or found.one_machine:
        return LoopbackSockets()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((found.address, found.port))  # sends nothing
        address = probe.getsockname()[0]
        return LoopbackSockets() if address.startswith("127.") else NetworkSockets(address)
    return LoopbackSockets()
