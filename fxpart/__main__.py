"""``python -m fxpart`` is the ``fxpart`` command."""

from __future__ import annotations

from fxpart.cli import main

main()
