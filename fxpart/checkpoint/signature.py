"""Signatures of manifests: HMAC-SHA256 with a secret key, in a file beside the manifest.

A manifest has the digests of all other files, so its signature covers their content.
"""

from __future__ import annotations

import hmac
import os
import stat
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from fxpart.errors import FxpartError, error
from fxpart.files import open_regular_file, read_bytes

SIGNATURE = "manifest.sig"
_FEWEST, _MOST = 16, 4096  # bytes of a key
_LONGEST = 200  # bytes of a signature file


@dataclass(frozen=True)
class SigningKey:
    """The content of a key file, without surrounding white space. path: of the file."""

    path: str
    secret: bytes = field(repr=False)

    @classmethod
    def load(cls, path: KeySource) -> SigningKey | None:
        """Read a key file, and warn if others can read it; return a key or None unchanged.

        FXP109 if it cannot be read, or has fewer than 16 bytes.
        """
        if path is None or isinstance(path, SigningKey):
            return path
        fix = "pass a file with a secret; make one by (umask 077; openssl rand -hex 32 > KEY)"
        try:
            secret = read_bytes(path, _MOST).strip()
            with open_regular_file(path) as (file, _):
                mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        except (OSError, TypeError, ValueError) as cause:
            why = f"The key file cannot be read: {getattr(cause, 'strerror', '') or cause}."
            raise error("FXP109", where=f"--sign {path}", why=why, fix=fix) from cause
        if len(secret) < _FEWEST:
            why = f"The key has {len(secret)} bytes; at least {_FEWEST} are required."
            raise error("FXP109", where=f"--sign {path}", why=why, fix=fix)
        if mode & 0o077:
            warnings.warn(
                f"the key file {path} can be read by other users: chmod 600 {path}", stacklevel=2
            )
        return cls(str(path), secret)

    def sign(self, manifest: bytes) -> bytes:
        """Return the content of the signature file of a manifest."""
        return hmac.digest(self.secret, manifest, "sha256").hex().encode() + b"\n"

    def check(self, folder: Path, manifest: bytes) -> None:
        """Compare a manifest with the signature in its folder; FXP524 if it does not match."""
        try:
            found = read_bytes(folder / SIGNATURE, _LONGEST)
        except FileNotFoundError as cause:
            fix = "use one that was saved with --sign; leave out --sign if you trust this one"
            why = f"it is not signed: there is no {SIGNATURE}"
            raise self._mismatch(folder, why, fix) from cause
        except OSError as cause:
            why = f"{SIGNATURE} cannot be read: {cause.strerror or cause}"
            raise self._mismatch(folder, why) from cause
        if not hmac.compare_digest(found, self.sign(manifest)):
            raise self._mismatch(folder, "it was signed with another key, or changed afterwards")

    def _mismatch(self, folder: Path, why: str, fix: str = "") -> FxpartError:
        fix = fix or "use the key that it was signed with; remove it if it was changed"
        return error("FXP524", where=f"{folder}, --sign {self.path}", why=why, fix=fix)


KeySource = SigningKey | str | Path | None
