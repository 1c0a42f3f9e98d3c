"""Which consumers the members of a broker group have seen, and which of them left.

A member that was started again knows a stock consumer by its next heartbeat only, up to 30 s later.
Until then it goes by what the other members saw: of each client of a group the newest sighting
counts, a heartbeat or a good-bye, and no heartbeat counts for longer than SIGHTING_MS. A connection
that closes is a good-bye, but not to a member that just ceased to lead: from there a consumer goes
to another one. Pure; times are ms of one monotonic clock, and travel as ages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from batonmq.broker.consume.consumer_manager import ConsumerManager
from batonmq.protocol.bodies import ConsumerSightingsBody

SIGHTING_MS: Final = 40_000
"""A stock client that lives is heard every 30 s."""
PIECE: Final = 500
"""How many clients one piece tells of, and how many old sightings one call forgets."""
TOLD_MAX: Final = 40_000
SAME_MS: Final = 1000
MOVING_MS: Final = 30_000
"""A stock client learns of another master within this time."""


class _Sighting(NamedTuple):
    at_ms: int
    is_member: bool


class ConsumerSightings:
    """What was told by other members, and who left here, beside the `clients` that are here."""

    def __init__(self, clients: ConsumerManager) -> None:
        self._clients = clients
        # Group -> client id -> its newest sighting; and all of them in the order of their coming.
        self._groups: dict[str, dict[str, _Sighting]] = {}
        self._came: deque[tuple[int, str, str, _Sighting]] = deque()
        self._leads = False
        self._moving_until_ms = 0

    def __len__(self) -> int:
        return len(self._came)

    def left(self, group: str, client_id: str, now_ms: int) -> None:
        """A client said good-bye to the group."""
        self._note(group, client_id, _Sighting(now_ms, is_member=False), now_ms)

    def closed(self, group: str, client_id: str, heard_ms: int, now_ms: int) -> None:
        """A client closed its connection to this member, or lost it. After a planned switch it goes
        to another one, and is listed meanwhile: two would read its queues otherwise."""
        if now_ms < self._moving_until_ms:
            self._note(group, client_id, _Sighting(heard_ms, is_member=True), now_ms)
        else:
            self.left(group, client_id, now_ms)

    def became_master(self) -> None:
        self._leads = True
        self._moving_until_ms = 0

    def role_left(self, now_ms: int) -> None:
        """Whatever the role was."""
        if self._leads:
            self._leads = False
            self._moving_until_ms = now_ms + MOVING_MS

    def learn(self, piece: ConsumerSightingsBody, now_ms: int) -> None:
        """Another member tells what it knows of some clients of a group."""
        for client_id, age_ms in piece.seen.items():
            self._note(piece.group, client_id, _Sighting(now_ms - age_ms, is_member=True), now_ms)
        for client_id, age_ms in piece.left.items():
            self._note(piece.group, client_id, _Sighting(now_ms - age_ms, is_member=False), now_ms)

    def client_ids(self, group: str, now_ms: int) -> list[str]:
        """The ids of who is here, and of who is a member by what others said; sorted."""
        oldest = now_ms - SIGHTING_MS
        learned = self._groups.get(group, {}).items()
        elsewhere = {id_ for id_, seen in learned if seen.is_member and seen.at_ms > oldest}
        here = self._clients.client_ids(group)
        return sorted(elsewhere.union(here)) if elsewhere else here

    def pieces(self, group: str, now_ms: int) -> Iterator[ConsumerSightingsBody]:
        """All that this member knows of a group, PIECE clients each; of all groups for ""."""
        for name in [group] if group else sorted({*self._clients.groups, *self._groups}):
            known = self._clients.groups.get(name)
            here = list(known.members.values()) if known is not None else []
            for start in range(0, len(here), PIECE):
                members = here[start : start + PIECE]
                seen = {one.client_id: now_ms - one.last_heartbeat_ms for one in members}
                yield ConsumerSightingsBody(group=name, seen=seen)
            learned = iter(list(self._groups.get(name, {}).items()))
            ids = set(self._clients.client_ids(name))
            while some := list(islice(learned, PIECE)):
                piece = ConsumerSightingsBody(group=name)
                for client_id, (at_ms, is_member) in some:
                    if client_id not in ids and now_ms - at_ms < SIGHTING_MS:
                        (piece.seen if is_member else piece.left)[client_id] = now_ms - at_ms
                yield piece

    def forget(self, now_ms: int) -> bool:
        """Drops what has been known for SIGHTING_MS, a slice a call; whether there may be more."""
        dropped = 0
        while self._came and self._came[0][0] <= now_ms - SIGHTING_MS and dropped < PIECE:
            self._drop_first()
            dropped += 1
        return dropped == PIECE

    def _note(self, group: str, client_id: str, seen: _Sighting, now_ms: int) -> None:
        before = self._groups.get(group, {}).get(client_id)
        if before is not None:
            # An age grows on its way: the same heartbeat told twice is no newer one.
            newer_by = SAME_MS if before.is_member == seen.is_member else 0
            if seen.at_ms <= before.at_ms + newer_by:
                return
        if seen.at_ms <= now_ms - SIGHTING_MS:
            return
        self._groups.setdefault(group, {})[client_id] = seen
        self._came.append((now_ms, group, client_id, seen))
        if len(self._came) > TOLD_MAX:
            self._drop_first()

    def _drop_first(self) -> None:
        """The sighting that came first, unless a newer one of that client took its place."""
        _, group, client_id, seen = self._came.popleft()
        known = self._groups.get(group, {})
        if known.get(client_id) is seen:
            del known[client_id]
            if not known:
                del self._groups[group]
