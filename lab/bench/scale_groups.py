"""Members of consumer groups: they come, one of each group goes, the others rebalance."""

import json
import selectors
import time
from typing import Any, Final

from lab.cluster import frames
from lab.cluster.connection import BlockingConnection

HEARTBEAT: Final = 34
CONSUMER_LIST: Final = 38
GROUP_SIZE: Final = 10
NOTICE_LIMIT_S: Final = 60.0


def members(address: str, count: int) -> dict[str, float]:
    """`count` connections of groups of GROUP_SIZE. One of each group closes: `notice_ms` until all
    others were notified, `rebalance_ms` until they also have the list of members that is left."""
    began = time.monotonic()
    groups: dict[str, list[BlockingConnection]] = {}
    for number in range(count):
        group = f"scale{number // GROUP_SIZE}"
        member = BlockingConnection(address, timeout_s=NOTICE_LIMIT_S)
        groups.setdefault(group, []).append(member)
        member.request(HEARTBEAT, body=_heartbeat(group, f"member{number}"))
    joined_s = time.monotonic() - began
    for group, those in groups.items():  # reads what notified each of those that came after it
        for member in those:
            _members_of(group, member)
    left = time.monotonic()
    for those in groups.values():
        those.pop().close()
    waiting = {group: those for group, those in groups.items() if those}
    _wait_for_notices([member for those in waiting.values() for member in those])
    noticed = time.monotonic()
    for group, those in waiting.items():
        for member in those:
            found = len(_members_of(group, member))
            if found != len(those):
                raise RuntimeError(f"{group} has {found} members, {len(those)} are left")
    done = time.monotonic()
    for those in groups.values():
        for member in those:
            member.close()
    return {
        "joins_per_second": count / joined_s,
        "notice_ms": (noticed - left) * 1000,
        "rebalance_ms": (done - left) * 1000,
    }


def _heartbeat(group: str, client: str) -> bytes:
    subscription = {"topic": "Scale0", "subString": "*", "subVersion": 1, "expressionType": "TAG"}
    consumer = {
        "groupName": group,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
        "subscriptionDataSet": [subscription],
        "unitMode": False,
    }
    beat = {"clientID": client, "producerDataSet": [], "consumerDataSet": [consumer]}
    return json.dumps(beat).encode()


def _members_of(group: str, member: BlockingConnection) -> list[Any]:
    reply = member.request(CONSUMER_LIST, {"consumerGroup": group})
    if reply.code != frames.OK:
        raise RuntimeError(f"members of {group}: code {reply.code} {reply.remark}")
    listed: list[Any] = reply.json["consumerIdList"]
    return listed


def _wait_for_notices(members: list[BlockingConnection]) -> None:
    """Each gets the notice that the members of its group changed: nothing else comes unasked."""
    deadline = time.monotonic() + NOTICE_LIMIT_S
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member, selectors.EVENT_READ)
        left = len(members)
        while left:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{left} of {len(members)} members were not notified")
            for key, _ in ready:
                selector.unregister(key.fileobj)
                left -= 1
