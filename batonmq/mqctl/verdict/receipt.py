"""A receipt: which bytes of which logs prove that acknowledged messages are safe.

It is checked offline, against copies of the stores: each log has the same id, and the same BLAKE2
digest over [begin, end) of each of its files.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from batonmq.mqctl.store_check import segments_of
from batonmq.mqctl.verdict.evidence import Evidence, StoreEvidence
from batonmq.mqctl.verdict.files import store_facts
from batonmq.mqctl.verdict.judge import Judgement

VERSION: Final = 1
_PIECE: Final = 4 << 20


def receipt(evidence: Evidence, judgement: Judgement) -> dict[str, Any]:
    """Reads every byte of the logs that it names."""
    groups = []
    for state in judgement.safeties:
        group = evidence.group(state.group)
        groups.append(
            {
                "group": state.group,
                "state": state.state,
                "how": state.how,
                "masterEpoch": group.master_epoch,
                "syncStateSet": list(group.members),
                "recordedBy": group.where,
                "confirmedOffset": group.confirmed,
                "endOffset": state.end,
                "lost": [list(each) for each in state.lost],
                "stores": [
                    _store(node.store, state.end)
                    for node in evidence.brokers(state.group)
                    if node.name in state.holders and node.store is not None
                ],
            }
        )
    return {"receipt": VERSION, "time": evidence.now_ms, "groups": groups}


def _store(store: StoreEvidence, end: int) -> dict[str, Any]:
    files = [
        {"file": path.name, "end": until, "blake2b": digest_of(path, until - int(path.name))}
        for path in segments_of(Path(store.folder) / "commitlog")
        if (until := min(end, int(path.name) + path.stat().st_size)) > int(path.name)
    ]
    return {
        "group": store.group,
        "brokerId": store.broker_id,
        "logId": store.log_id,
        "lineage": store.lineage,
        "epochs": [list(each) for each in store.epochs],
        "damagedRanges": [[f.offset, f.offset + f.size] for f in store.damages],
        "files": files,
    }


def digest_of(path: Path, size: int) -> str:
    """BLAKE2b of a file's first `size` bytes; "short" if it has fewer. Raises OSError."""
    total = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while size > 0 and (piece := file.read(min(size, _PIECE))):
            total.update(piece)
            size -= len(piece)
    return "short" if size > 0 else total.hexdigest()


def check(document: dict[str, Any], folders: Iterable[Path]) -> list[str]:
    """What does not fit, as sentences; empty: every group of the receipt is proven by a store that
    is here. Raises KeyError, TypeError for what is no receipt, OSError."""
    # By the log's id: copies may lie in any folder.
    stores = {store.log_id: store for folder in folders for store in map(store_facts, _in(folder))}
    wrong = []
    for group in document["groups"]:
        name = group["group"]
        # Whoever checks has only the file: it must not prove what it does not claim.
        if group["state"] != "safe":
            wrong.append(f"{name}: the receipt itself says {group['state']}: {group['how']}")
            continue
        known = [each for each in group["stores"] if each["logId"] in stores]
        if not known:
            wrong.append(f"{name}: none of the stores that prove it is here")
        for each in known:
            wrong += _differences(name, each, stores[each["logId"]])
    return wrong


def _in(folder: Path) -> list[Path]:
    """The stores in a folder: itself, or those of a data folder of `batonmq up`."""
    if (folder / "commitlog").is_dir():
        return [folder]
    return [path.parent for path in sorted(folder.glob("*/commitlog"))]


def _differences(group: str, wanted: dict[str, Any], store: StoreEvidence) -> list[str]:
    wrong = []
    for field, found in (("lineage", store.lineage), ("brokerId", store.broker_id)):
        if wanted[field] != found:
            wrong.append(f"{group}: {store.folder}: {field} is {found}, was {wanted[field]}")
    for file in wanted["files"]:
        # Its last part only: a receipt from somebody else must not lead out of the store.
        path = Path(store.folder) / "commitlog" / Path(file["file"]).name
        try:
            found = digest_of(path, file["end"] - int(path.name))
        except OSError as error:
            found = error.strerror or "unreadable"
        if found != file["blake2b"]:
            what = found if len(found) < 64 else "other bytes than the receipt's"
            wrong.append(f"{group}: {path} up to offset {file['end']}: {what}")
    return wrong
