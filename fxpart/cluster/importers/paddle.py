"""Import PaddlePaddle's cluster JSON; import and export are lossless.

The document is also stored under the cluster's key ``paddle``. An export starts from it and changes
only what differs, so that number formats, order and unknown keys are preserved. Facts that the
format cannot represent (measured curves, cores of hosts, ...) are written under the document's key
``fxpart``, which PaddlePaddle ignores.

Units: GFLOP/s, GB, GB/s and ms (10^9, 10^-3). The format has no memory bandwidth, which is taken
from a link of a device to itself, the data file of the model, or ``--memory-gbs``.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET

from fxpart.cluster.importers.paddle_document import KEY, OWN, plain
from fxpart.cluster.importers.source_facts import (
    ImportedCluster,
    ImportOptions,
    make_import_error,
    parse_json,
    validate_imported,
)
from fxpart.cluster.model import Cluster
from fxpart.errors import FxpartError


def looks_like(text: str) -> bool:
    """Return whether a text is JSON with machines."""
    return text.lstrip()[:1] == "{" and '"machines"' in text


def read(text: str, facts: ImportOptions) -> ImportedCluster:
    """Return the cluster of a document; FXP407 names an invalid key."""
    if facts.into is not None:
        fix = "import it without --into"
        raise make_import_error(
            "--into", "PaddlePaddle's JSON describes a whole cluster, not a part of one", fix
        )
    document = parse_json(text)
    own = _exported_cluster(document)
    if own is not None:
        return ImportedCluster(own)
    cluster = validate_imported(plain(document, facts), "the document")
    missing = [x for x in cluster.links if "no latency" in x.origin]
    notes = (f"{len(missing)} links have no latency in the document, so 0 is assumed",)
    return ImportedCluster(cluster, notes if missing else ())


def _exported_cluster(document: Any) -> Cluster | None:
    """Return the cluster under the key ``fxpart`` if the document is unchanged since export."""
    from fxpart.cluster.files import from_builtins
    from fxpart.cluster.importers.paddle_export import document_of

    if not isinstance(document, dict) or not isinstance(document.get(OWN), dict):
        return None
    others = {key: value for key, value in document.items() if key != OWN}
    try:
        cluster = from_builtins(Cluster, document[OWN])
        extra = {} if cluster.extra is UNSET else cluster.extra
        kept = msgspec.structs.replace(cluster, extra={**extra, KEY: others})
        return next((each for each in (cluster, kept) if document_of(each) == document), None)
    except FxpartError:
        return None
