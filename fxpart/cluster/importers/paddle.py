"""PaddlePaddle's cluster JSON, in both directions without loss.

What it says is read into devices and links; the document itself is kept under the cluster's key
``paddle``. Writing starts from that document and changes only what the cluster says otherwise, so
that texts for numbers, order and unknown keys stay. What the format has no place for (measured
curves, hosts' cores, ...) goes under the document's own key ``fxpart``, which PaddlePaddle ignores.

Units: GFLOP/s, GB, GB/s and ms (10^9, 10^-3). Its format has no memory bandwidth: that comes from
a link of a device to itself, the data file of the model, or ``--memory-gbs``.
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
    """Whether a text is JSON with machines."""
    return text.lstrip()[:1] == "{" and '"machines"' in text


def read(text: str, facts: ImportOptions) -> ImportedCluster:
    """The cluster of a document; FXP407 naming the key where it cannot be read."""
    if facts.into is not None:
        fix = "import it without --into"
        raise make_import_error(
            "--into", "PaddlePaddle's JSON is a whole cluster, not a part of one", fix
        )
    document = parse_json(text)
    own = _own(document)
    if own is not None:
        return ImportedCluster(own)
    cluster = validate_imported(plain(document, facts), "the document")
    missing = [x for x in cluster.links if "no latency" in x.origin]
    notes = (f"{len(missing)} links have no latency in the document; it is taken as 0",)
    return ImportedCluster(cluster, notes if missing else ())


def _own(document: Any) -> Cluster | None:
    """What fxpart wrote beside PaddlePaddle's keys, where those have not been changed since."""
    from fxpart.cluster.files import from_builtins
    from fxpart.cluster.importers.paddle_export import document_of

    if not isinstance(document, dict) or not isinstance(document.get(OWN), dict):
        return None
    rest = {key: value for key, value in document.items() if key != OWN}
    try:
        cluster = from_builtins(Cluster, document[OWN])
        extra = {} if cluster.extra is UNSET else cluster.extra
        kept = msgspec.structs.replace(cluster, extra={**extra, KEY: rest})
        return next((each for each in (cluster, kept) if document_of(each) == document), None)
    except FxpartError:
        return None
