"""In-memory checkpoint replicas on a second host, so that the loss of a host needs no disk.

After a save each rank copies its file into the memory of its own host and sends it to a rank of the
next host, in a ring. At a restart the remaining hosts compare their inventories and exchange
missing files.
"""

from __future__ import annotations

import hashlib
import os
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
from fxpart.checkpoint.signature import SIGNATURE
from fxpart.environment import Launch, read_launch
from fxpart.errors import FxpartError, error
from fxpart.files import read_bytes
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
_LONGEST_WORD = 100  # bytes


class _ProcessIdentity(msgspec.Struct, frozen=True):
    """Identity of a process. run: the run's identity, from rank 0."""

    host: str
    run: str = ""


class CheckpointReplicas:
    """In-memory replicas of a run's checkpoints on all hosts.

    problems: failures; training then continues without replicas. kept: newest step whose files of
    this process are in memory here and on the partner's host, -1 before the first.
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
        """Create the store; every rank creates one at the same time.

        root: the run's folder in this host's memory. host: name of this host. hosts: host of every
        rank. kind: how hosts connect, over the loopback interface by default. patience: seconds
        without progress after which a partner is abandoned.
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
        to, of = self._partners()
        self._out: Peers = {}
        self._into: Peers = {}
        if len(set(self._hosts)) > 1:
            self._connect(to, of)

    @classmethod
    def of(
        cls, run: RunDir, transport: Transport, *, host: str | None = None, root: Path | None = None
    ) -> CheckpointReplicas:
        """Create the replicas of a run; every rank calls it.

        host, root: override this host's own; another root counts as another host.
        """
        own = _host_name() if root is None else f"{_host_name()} {root}"
        name = own if host is None else host
        identity = agree(
            transport, "the run's identity",
            lambda: (read_identity(run) if 0 in transport.local else "", ""),
        )  # fmt: skip
        with convert_transport_errors(transport, "sharing the host names"):
            messages = transport.exchange_bytes(
                msgspec.json.encode(_ProcessIdentity(name, identity))
            )
        identities = [msgspec.json.decode(each, type=_ProcessIdentity) for each in messages]
        hosts = [each.host for each in identities]
        if len(hosts) < transport.ranks:  # one process has all ranks
            hosts *= transport.ranks
        place = default_root(identities[0].run) if root is None else root
        return cls(place, name, hosts, transport, kind=_kind(read_launch()))

    # -- after a save ---------------------------------------------------------------------------

    def keep(self, step: int, folder: Path, manifest: CheckpointManifest) -> None:
        """Copy this process's files of a complete checkpoint; failures are added to
        :attr:`problems`.

        Each rank calls it for the same checkpoints in the same order, and starts the next when all
        have finished this one (as a Saver does), because the previous one is kept until then.
        Returns when the partner has the files.
        """
        if self._memory is None:
            return
        try:
            text = (folder / NAME).read_bytes()
            where = folder_name(step, text)
            names = [n for n in manifest.files if n in self._own_files()]
            if self._is_first_of_host:
                names += [n for n in manifest.files if not n.startswith("rank-")]
                names += [n for n in (SIGNATURE, NAME) if (folder / n).exists()]
            self._delete_old(where)
            # the manifest last: its presence means that this host's files are complete
            for name in names:
                path = self._memory.copy(folder / name, where)
                for rank in self._out:
                    self._send(rank, where, path)
            if self._out or len(set(self._hosts)) == 1:
                self.kept = step
        except (OSError, ValueError) as cause:
            self._note(f"step {step}", cause)

    def gather(self, at_least: int = -1, tried: Collection[str] = ()) -> Path | None:
        """Collect the newest checkpoint with all files in some host's memory into this host's
        memory.

        Return its folder, of the same step on every rank; None on all if there is none from step
        ``at_least`` on, except those tried. Every rank calls it while no save is in progress. File
        contents are verified when they are read.
        """
        messages = self._encode_inventory() if self._is_first_of_host else b""
        with convert_transport_errors(self._transport, "looking for checkpoints in memory"):
            raw = self._transport.exchange_bytes(messages)
        machines = {
            self._hosts[rank]: msgspec.json.decode(text, type=CheckpointMemoryInventory)
            for rank, text in enumerate(raw)
            if text
        }
        found = select_checkpoint(machines, at_least, tried)
        if found is None:
            return None
        where, transfers = found
        done = self._transfer(where, transfers) if transfers else True
        with convert_transport_errors(self._transport, "transferring checkpoints"):
            if not all(self._transport.exchange_bytes(b"\1" if done else b"")):
                return None
        return self._root / where

    def close(self) -> None:
        """Close the connections; the files stay in memory."""
        for peer in (*self._out.values(), *self._into.values()):
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()
        self._out, self._into = {}, {}

    def remove(self) -> None:
        """Delete the files of this host at the end of the run."""
        if self._memory is not None and self._is_first_of_host:
            self._memory.remove()

    # -- inner ----------------------------------------------------------------------------------

    @property
    def _is_first_of_host(self) -> bool:
        """Whether this process is the first of its host."""
        return self._hosts.index(self._host) in self._transport.local

    def _leaders(self) -> dict[str, int]:
        return {host: self._hosts.index(host) for host in dict.fromkeys(self._hosts)}

    def _own_files(self) -> set[str]:
        return {f"rank-{rank:05d}.safetensors" for rank in self._transport.local}

    def _partners(self) -> tuple[list[int], list[int]]:
        """Return the ranks that this rank sends to and receives from, with hosts in a ring."""
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
            self._note("partners", OSError(0, "not every rank can reach the host of its partner"))
            return
        self._out, self._into = made
        for rank, peer in self._into.items():
            # In a thread, to receive while this rank computes.
            threading.Thread(
                target=self._receive_files, args=(peer,), name=f"copies-of-{rank}", daemon=True
            ).start()

    def _receive_files(self, peer: socket.socket) -> None:
        """Receive until the sender closes; other code detects a lost host."""
        with suppress(OSError, ValueError):
            while receive_file(peer, self._memory, self._patience):
                pass
        peer.close()

    def _send(self, rank: int, where: str, path: Path) -> None:
        """Send a file to the partner; after OSError the connection is closed."""
        there = f"rank {rank} on {self._hosts[rank]}"
        try:
            done = send_file(self._out[rank], where, path, self._patience)
        except OSError as cause:
            self._out.pop(rank).close()
            raise OSError(0, f"{there} cannot be reached: {cause}") from cause
        if not done:
            raise OSError(0, f"{there} cannot store {path.name}")

    def _delete_old(self, where: str) -> None:
        """Delete all checkpoints but this one and the previous one."""
        assert self._memory is not None
        step = step_of(where)
        before = [name for name in self._memory.inventory() if step_of(name) < step]
        kept = max(before, key=step_of, default=where)
        same = [n for n in before if step_of(n) == step_of(kept)]
        self._memory.drop({where, *same})

    def _encode_inventory(self) -> bytes:
        """Return the inventory of this host's memory."""
        if self._memory is None:
            return msgspec.json.encode(CheckpointMemoryInventory({}, {}, 0))
        present = self._memory.inventory()
        needed = {}
        for where in present:
            manifest = self._memory.manifest(where)
            if manifest is not None:
                own = {n: s for n, s in present[where].items() if n in (NAME, SIGNATURE)}
                needed[where] = {n: f.size for n, f in manifest.files.items()} | own
        return msgspec.json.encode(CheckpointMemoryInventory(present, needed, self._memory.free))

    def _transfer(self, where: str, transfers: Sequence[ReplicaTransfer]) -> bool:
        """Send and receive missing files; return whether this host is complete."""
        leaders, me = self._leaders(), self._transport.local[0]
        out = [m for m in transfers if leaders[m.source] == me]
        into = [m for m in transfers if leaders[m.target] == me]
        to = sorted({leaders[m.target] for m in out})
        of = sorted({leaders[m.source] for m in into})
        made = connect_ranks(me, self._transport.exchange_bytes, self._kind, to, of)
        if made is None:
            return False
        failed: list[BaseException] = []

        def send_files(rank: int, peer: socket.socket) -> None:
            try:
                for transfer in out:
                    if leaders[transfer.target] == rank:
                        path = self._root / where / transfer.file
                        if not send_file(peer, where, path, self._patience):
                            raise OSError(0, f"rank {rank} could not store {transfer.file}")
            except OSError as cause:
                failed.append(cause)

        def receive_files(rank: int, peer: socket.socket) -> None:
            try:
                for _ in [transfer for transfer in into if leaders[transfer.source] == rank]:
                    if not receive_file(peer, self._memory, self._patience):
                        raise ConnectionError(f"rank {rank} has closed the connection")
            except (OSError, ValueError) as cause:
                failed.append(cause)

        jobs = [(send_files, *pair) for pair in made[0].items()]
        jobs += [(receive_files, *pair) for pair in made[1].items()]
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
        fix = "training continues; checkpoints on disk are unaffected"
        self.problems.append(
            error("FXP513", where=f"checkpoint replicas in memory, {where}", why=why, fix=fix)
        )


def read_identity(run: RunDir) -> str:
    """Return the name of a run's replicas, the same on every host; FXP513.

    It combines the folder's random word, created here if there is no valid one, with the inode of
    the folder: a copy of the folder, or another one without a valid word, has another name.
    """
    with files.convert_save_errors(str(run.path)):
        run.path.mkdir(parents=True, exist_ok=True)
        word = _read_word(run.identity)
        if not word:
            word = secrets.token_hex(8)
            beside = run.identity.with_name(f".{run.identity.name}.{os.getpid()}")
            with files.create_file(beside) as file:
                files.write(file, word.encode())
            beside.replace(run.identity)
        inode = run.path.stat().st_ino
    return hashlib.blake2b(f"{word} {inode}".encode(), digest_size=8).hexdigest()


def _read_word(path: Path) -> str:
    """Return the random word of a run, or "" if the file has no valid one."""
    try:
        text = read_bytes(path, _LONGEST_WORD).decode("ascii").strip()
    except (OSError, ValueError):
        return ""
    return text if files.is_name(text) and len(text) == 16 else ""


def _host_name() -> str:
    """Return a name of this host that changes with each boot."""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()[:8]
    return f"{socket.gethostname()} {boot}".strip()


def _kind(found: Launch | None) -> SocketKind:
    """Use the loopback interface on one host, else the interface that reaches the store."""
    if found is None or found.one_machine:
        return LoopbackSockets()
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((found.address, found.port))  # sends nothing
        address = probe.getsockname()[0]
        return LoopbackSockets() if address.startswith("127.") else NetworkSockets(address)
    return LoopbackSockets()
