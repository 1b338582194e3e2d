"""A manifest as bytes and back: canonical JSON that holds its own digest."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from fxpart.checkpoint import value_codec
from fxpart.checkpoint.manifest import FORMAT, VERSION, CheckpointManifest
from fxpart.files import from_json

LARGEST = 1 << 28  # bytes of a manifest; some 300 for each part of a tensor
_DIGEST = re.compile(rb'\{"calls":-?\d{1,30},"digest":"([0-9a-f]{64})"')
_FREE = ("values", "groups", "extra")


def digest(data: bytes | memoryview = b"") -> Any:
    """A running SHA-256; ``.hexdigest()`` is what manifests hold.

    Processors have instructions for it: twice as fast as BLAKE2b where saving is measured.
    """
    return hashlib.sha256(data, usedforsecurity=False)


@dataclass
class CorruptManifestError(Exception):
    """Bytes that are no whole manifest, and why."""

    why: str


def encode(manifest: CheckpointManifest) -> bytes:
    """The file's bytes, with the digest of all the others. TypeError: see ``value_codec``."""
    free = {name: value_codec.to_json_value(getattr(manifest, name), name) for name in _FREE}
    bare = msgspec.structs.replace(manifest, digest="", **free)
    return signed(msgspec.json.encode(bare, order="sorted"))


def signed(text: bytes) -> bytes:
    """A manifest's canonical JSON of which the digest is "", with it."""
    before, mark, after = text.partition(b'"digest":"')
    # Keys are sorted, so that this is the manifest's own and not that of a part.
    assert mark and before.startswith(b'{"calls":') and before.count(b'"') == 2
    made: str = digest(text).hexdigest()
    return before + mark + made.encode() + after


def decode(data: bytes) -> CheckpointManifest:
    """The manifest in a file's bytes; :class:`CorruptManifestError` where one bit of them is
    another.

    What it says of files and tensors has still to be compared with them and with itself.
    """
    found = _DIGEST.match(data)
    if found is None:
        raise CorruptManifestError("it does not begin as a manifest does")
    at, end = found.span(1)
    if digest(data[:at] + data[end:]).hexdigest().encode() != found[1]:
        raise CorruptManifestError("its bytes are not those that were written")
    try:
        head = msgspec.json.decode(data, type=_ManifestVersion)
        if (head.format, head.version) != (FORMAT, VERSION):
            raise CorruptManifestError(
                f"it is of format {head.format[:40]!r}, version {head.version}"
            )
        manifest = from_json(data, CheckpointManifest)
        free = {name: value_codec.from_json_value(getattr(manifest, name)) for name in _FREE}
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as cause:
        why = str(cause)[:200] or type(cause).__name__
        raise CorruptManifestError(f"it is no manifest: {why}") from cause
    return msgspec.structs.replace(manifest, **free)


class _ManifestVersion(msgspec.Struct):
    """What is read first, whatever the rest is."""

    format: str
    version: int
