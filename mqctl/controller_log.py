"""What a controller says of its Raft log, as the commands show it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batonmq.admin_types import ControllerMetadata


def log_fields(answer: ControllerMetadata) -> dict[str, Any]:
    """The log's position and sizes, named as on the wire; empty for a RocketMQ controller."""
    log = answer.log
    if log is None:
        return {}
    return {
        "selfId": log.self_id,
        "controllerEpoch": log.controller_epoch,
        "raftTerm": log.term,
        "appliedIndex": log.applied_index,
        "committedIndex": log.committed_index,
        "journalBytes": log.journal_bytes,
        "journalEntries": log.journal_entries,
        "snapshotBytes": log.snapshot_bytes,
        "snapshotIndex": log.snapshot_index,
        "digestIndex": log.digest_index,
        "stateDigest": log.state_digest,
        "problems": list(log.problems),
    }
