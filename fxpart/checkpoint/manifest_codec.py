"""Encoding of manifests: canonical JSON with a digest of itself."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from fxpart.checkpoint import value_codec
from fxpart.checkpoint.manifest import FORMAT, VERSION, CheckpointManifest
from fxpart.files import from_json

LARGEST = 1 << 28  # bytes of a manifest; about 300 per part of a tensor
_DIGEST = re.compile(rb'\{"calls":-?\d{1,30},"digest":"([0-9a-f]{64})"')
_PLAIN_FIELDS = ("values", "groups", "extra")


def digest(data: bytes | memoryview = b"") -> Any:
    """Return a running SHA-256; ``.hexdigest()`` is stored in manifests.

    Processors have instructions for it, so it is twice as fast as BLAKE2b.
    """
    return hashlib.sha256(data, usedforsecurity=False)


@dataclass
class CorruptManifestError(Exception):
    """Bytes that are not a complete manifest, and why."""

    why: str


def encode(manifest: CheckpointManifest) -> bytes:
    """Return the file's bytes, with a digest of all others. TypeError: see ``value_codec``."""
    plain_fields = {
        name: value_codec.to_json_value(getattr(manifest, name), name) for name in _PLAIN_FIELDS
    }
    unsigned = msgspec.structs.replace(manifest, digest="", **plain_fields)
    return insert_digest(msgspec.json.encode(unsigned, order="sorted"))


def insert_digest(text: bytes) -> bytes:
    """Insert the digest into a manifest's canonical JSON with digest ""."""
    before, marker, after = text.partition(b'"digest":"')
    # Keys are sorted, so this is the manifest's own digest and not that of a part.
    assert marker and before.startswith(b'{"calls":') and before.count(b'"') == 2
    hexdigest: str = digest(text).hexdigest()
    return before + marker + hexdigest.encode() + after


def decode(data: bytes) -> CheckpointManifest:
    """Decode a manifest; :class:`CorruptManifestError` if any bit has changed.

    Its consistency with itself and with the files must be checked separately.
    """
    found = _DIGEST.match(data)
    if found is None:
        raise CorruptManifestError("it does not begin like a manifest")
    at, end = found.span(1)
    if digest(data[:at] + data[end:]).hexdigest().encode() != found[1]:
        raise CorruptManifestError("its digest does not match")
    try:
        head = msgspec.json.decode(data, type=_ManifestVersion)
        if (head.format, head.version) != (FORMAT, VERSION):
            raise CorruptManifestError(
                f"unsupported format {head.format[:40]!r}, version {head.version}"
            )
        manifest = from_json(data, CheckpointManifest)
        plain_fields = {
            name: value_codec.from_json_value(getattr(manifest, name)) for name in _PLAIN_FIELDS
        }
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as cause:
        why = str(cause)[:200] or type(cause).__name__
        raise CorruptManifestError(f"it is not a manifest: {why}") from cause
    return msgspec.structs.replace(manifest, **plain_fields)


class _ManifestVersion(msgspec.Struct):
    """Format and version, read first."""

    format: str
    version: int
