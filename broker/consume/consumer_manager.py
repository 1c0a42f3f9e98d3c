"""Which clients are connected, as producers or as members of consumer groups. Pure.

It takes heartbeats and closed channels, and returns the members to notify. A client is identified
by its channel, and leaves when that closes, or after 120 s without a heartbeat.

`ConsumerSightings` adds the consumers that other replicas have seen. A restarted replica knows a
stock consumer only after its next heartbeat, up to 30 s later. Until then the newest sighting of
each client counts, a heartbeat or a good-bye; a heartbeat counts for SIGHTING_MS. A closed
connection is a good-bye, except at a replica that has just lost the lead, because its consumers
then move to another one. Times are ms of one monotonic clock, and travel as ages.

Origin: ConsumerManager, ProducerManager and ConsumerGroupInfo in Java.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, filterfalse, islice, takewhile
from operator import attrgetter
from typing import Final, NamedTuple

from batonmq.protocol.bodies import (
    ConsumerData,
    ConsumerSightingsBody,
    HeartbeatData,
    SubscriptionData,
)

CLIENT_EXPIRED_MS: Final = 120_000
"""Four heartbeats of a stock client, as in Java."""
_EXPIRED_AT_ONCE: Final = 128
"""Places that one call gives up (R58)."""
SEATS_MAX: Final = 500_000
"""Places of clients in groups; one takes about half a kilobyte."""
SUBSCRIPTION_BYTES_MAX: Final = 256 << 20
"""What the subscriptions of all groups may take, roughly."""
_SUBSCRIPTION_BYTES: Final = 600
"""Roughly what a subscription takes without its texts; a tag takes _TAG_BYTES and its text."""
_TAG_BYTES: Final = 100
_TOPIC: Final = attrgetter("topic")
_TEXTS: Final = attrgetter("topic", "sub_string", "expression_type")
_TAGS: Final = attrgetter("tags_set")
_CODES: Final = attrgetter("code_set")

SIGHTING_MS: Final = 40_000
"""Above the 30 s between two heartbeats of a stock client."""
PIECE: Final = 500
"""Clients in one piece of an answer, and old sightings that one call drops."""
SIGHTINGS_MAX: Final = 40_000
SAME_MS: Final = 1000
"""If two sightings are closer, they are one heartbeat that two replicas reported."""
MOVING_MS: Final = 30_000
"""A stock client learns of another master within this time."""


@dataclass(slots=True)
class ClientChannel:
    """One client as one group knows it."""

    channel: Hashable
    client_id: str
    language: int
    version: int
    last_heartbeat_ms: int
    #: Topic -> (subVersion of its pulls above the known one, since when), since this heartbeat.
    unannounced: dict[str, tuple[int, int]] | None = None


@dataclass(slots=True)
class ConsumerGroup:
    """The members of a group and what they subscribe to."""

    name: str
    consume_type: str
    message_model: str
    consume_from_where: str
    members: dict[Hashable, ClientChannel] = field(default_factory=dict)
    subscriptions: dict[str, SubscriptionData] = field(default_factory=dict)
    subscription_bytes: int = 0
    #: Sorted, without repetition. Kept up to date, because every member asks for the list at each
    #: rebalance.
    client_ids: list[str] = field(default_factory=list)
    _channels_of: dict[str, int] = field(default_factory=dict)

    def join(self, member: ClientChannel) -> bool:
        """Adds or updates a member; returns whether its client id is new."""
        # A client may change its id on the same connection.
        known = self.members.get(member.channel)
        self.members[member.channel] = member
        if known is not None:
            if known.client_id == member.client_id:
                return False
            self._drop_id(known.client_id)
        channels = self._channels_of.get(member.client_id, 0)
        # A client may have several connections, but its id is listed once.
        if not channels:
            insort(self.client_ids, member.client_id)
        self._channels_of[member.client_id] = channels + 1
        return True

    def leave(self, channel: Hashable) -> ClientChannel:
        """Removes the client; returns who left. Raises KeyError if there is none."""
        gone = self.members.pop(channel)
        self._drop_id(gone.client_id)
        return gone

    def _drop_id(self, client_id: str) -> None:
        self._channels_of[client_id] -= 1
        if not self._channels_of[client_id]:
            del self._channels_of[client_id]
            del self.client_ids[bisect_left(self.client_ids, client_id)]


@dataclass(frozen=True, slots=True)
class GroupChanged:
    """The members of `group` changed. `channels` are to be notified; empty if the last member left.
    `left`: the client id that left, or ""; `heard_ms`: its last heartbeat."""

    group: str
    channels: tuple[Hashable, ...]
    left: str = ""
    heard_ms: int = 0


class _Seat(NamedTuple):
    """A client's place in one group."""

    is_consumer: bool
    group: str
    channel: Hashable


class ConsumerManager:
    """Tables of consumer groups and producer groups. Times are ms of one monotonic clock."""

    def __init__(self) -> None:
        # Seat -> last heartbeat, oldest first; and the seats of each channel.
        self._heard: dict[_Seat, int] = {}
        self._seats: dict[Hashable, dict[_Seat, None]] = {}
        self.groups: dict[str, ConsumerGroup] = {}
        self.producers: dict[str, dict[Hashable, ClientChannel]] = {}
        #: Called with the group of a producer that was not known.
        self.producer_came: Callable[[str], None] = lambda group: None
        # Client id of a producer -> its last group and channel.
        self._producer_places: dict[str, tuple[str, Hashable]] = {}
        self._subscription_bytes = 0

    def has_space(self, data: ConsumerData) -> bool:
        """R58: whether these subscriptions may be kept. A group may always replace its own by
        others of that size: a client that restarts gives them another version."""
        if self._subscription_bytes < SUBSCRIPTION_BYTES_MAX:
            return True
        group = self.groups.get(data.group_name)
        held = group.subscription_bytes if group is not None else 0
        return _bytes_of(data.subscription_data_set) <= held

    def heartbeat(
        self, data: HeartbeatData, channel: Hashable, language: int, version: int, now_ms: int
    ) -> list[GroupChanged]:
        """Returns the groups whose members or subscriptions this heartbeat changed."""

        def client() -> ClientChannel:
            return ClientChannel(channel, data.client_id, language, version, now_ms)

        changed = self._evict_if_full()
        for producer in data.producer_data_set:
            members = self.producers.setdefault(producer.group_name, {})
            is_new = channel not in members
            members[channel] = client()
            if is_new:
                self.producer_came(producer.group_name)
            self._producer_places[data.client_id] = (producer.group_name, channel)
            self._hear(_Seat(False, producer.group_name, channel), now_ms)
        for consumer in data.consumer_data_set:
            self._hear(_Seat(True, consumer.group_name, channel), now_ms)
            if self._consumer(consumer, client(), without_subscription=data.without_sub):
                group = self.groups[consumer.group_name]
                changed.append(GroupChanged(group.name, tuple(group.members)))
        return changed

    def _consumer(
        self, data: ConsumerData, client: ClientChannel, *, without_subscription: bool
    ) -> bool:
        group = self.groups.get(data.group_name)
        if group is None:
            group = self.groups[data.group_name] = ConsumerGroup(
                data.group_name, data.consume_type, data.message_model, data.consume_from_where
            )
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        before = group.members.get(client.channel)
        changed = group.join(client)
        # Heartbeats without subscriptions only keep the client alive. A change lets it send them.
        if without_subscription:
            return changed or (before is not None and before.unannounced is not None)
        subscriptions = data.subscription_data_set
        wanted = dict(zip(map(_TOPIC, subscriptions), subscriptions, strict=True))
        known = group.subscriptions
        # Almost every heartbeat equals the last one, so one comparison of two dicts is enough.
        if known == wanted:
            return changed
        changed |= self._subscribe(group, wanted)
        self._subscription_bytes -= group.subscription_bytes
        group.subscription_bytes = _bytes_of(list(group.subscriptions.values()))
        self._subscription_bytes += group.subscription_bytes
        return changed

    def _subscribe(self, group: ConsumerGroup, wanted: dict[str, SubscriptionData]) -> bool:
        known, changed = group.subscriptions, False
        for topic in known.keys() - wanted.keys():
            del known[topic]
            changed = True
        if not known:
            group.subscriptions = wanted
            return True
        for topic, sub in wanted.items():
            before = known.get(topic)
            if before is None:
                changed = True
            # During an update of the members an old one must not undo a newer subscription.
            if before is None or sub.sub_version > before.sub_version:
                known[topic] = sub
        return changed

    def unregister(
        self, channel: Hashable, producer_group: str | None, consumer_group: str | None
    ) -> list[GroupChanged]:
        seats = []
        if producer_group:
            seats.append(_Seat(False, producer_group, channel))
        if consumer_group:
            seats.append(_Seat(True, consumer_group, channel))
        return self._leave(seats)

    def channel_closed(self, channel: Hashable) -> list[GroupChanged]:
        """Removes a client whose connection closed from a slice of its groups. Call again while
        `is_known`."""
        return self._leave(list(islice(self._seats.get(channel, ()), _EXPIRED_AT_ONCE)))

    def is_known(self, channel: Hashable) -> bool:
        """Whether a client on this channel is in any group."""
        return channel in self._seats

    def expire(self, now_ms: int) -> list[GroupChanged]:
        """Removes clients from groups for which they sent no heartbeat in 120 s, the longest silent
        first; at most 128 per call."""
        oldest = now_ms - CLIENT_EXPIRED_MS
        # Seats are in order of heartbeats, so stop at the first that is not silent.
        silent = takewhile(lambda seat: self._heard[seat] < oldest, self._heard)
        return self._leave(list(islice(silent, _EXPIRED_AT_ONCE)))

    def client_ids(self, group: str) -> list[str]:
        """The members' ids, sorted; empty if there are none. The group's own list, not a copy."""
        known = self.groups.get(group)
        return known.client_ids if known else []

    def subscription(self, group: str, topic: str) -> SubscriptionData | None:
        known = self.groups.get(group)
        return known.subscriptions.get(topic) if known else None

    def unannounced_ms(
        self, group: str, channel: Hashable, topic: str, version: int, now_ms: int
    ) -> int:
        """A member pulls with a newer subscription than its group's heartbeats have. Returns for
        how long, since its last heartbeat."""
        known = self.groups.get(group)
        member = known.members.get(channel) if known else None
        if member is None:
            return 0
        member.unannounced = member.unannounced or {}
        before, since_ms = member.unannounced.get(topic, (-1, now_ms))
        if before < version:
            since_ms = now_ms
            member.unannounced[topic] = version, since_ms
        return now_ms - since_ms

    def producer_channel(self, client_id: str) -> Hashable | None:
        """The connection of a client that is a producer in any group."""
        group, channel = self._producer_places.get(client_id, ("", None))
        member = self.producers.get(group, {}).get(channel)
        return member.channel if member is not None and member.client_id == client_id else None

    def next_producer(self, group: str) -> Hashable | None:
        """The connection of a producer of the group: round robin."""
        members = self.producers.get(group)
        if not members:
            return None
        channel = next(iter(members))
        members[channel] = members.pop(channel)  # moves it to the end
        return channel

    def message_model(self, group: str) -> str:
        """CLUSTERING or BROADCASTING, by the newest heartbeat of the group; "" without members."""
        known = self.groups.get(group)
        return known.message_model if known else ""

    def _leave_producer(self, group: str, channel: Hashable) -> None:
        members = self.producers[group]
        gone = members.pop(channel)
        if not members:
            del self.producers[group]
        # The client may have registered by another connection or group since: keep that.
        if self._producer_places.get(gone.client_id) == (group, channel):
            del self._producer_places[gone.client_id]

    def _evict_if_full(self) -> list[GroupChanged]:
        """R58: if there are too many seats, the client that has the most loses its oldest."""
        if len(self._heard) < SEATS_MAX:
            return []
        largest = max(self._seats.values(), key=len)
        # Many at once: the look at all clients takes a millisecond.
        return self._leave(list(islice(largest, _EXPIRED_AT_ONCE)))

    def _hear(self, seat: _Seat, now_ms: int) -> None:
        # Inserted again at the end, so that the dict stays in order of last heartbeats.
        self._heard.pop(seat, None)
        self._heard[seat] = now_ms
        self._seats.setdefault(seat.channel, {})[seat] = None

    def _leave(self, seats: Iterable[_Seat]) -> list[GroupChanged]:
        left: list[tuple[str, ClientChannel]] = []
        for seat in seats:
            # The client may not be in the group, or may have left it already.
            if self._heard.pop(seat, None) is None:
                continue
            _, name, channel = seat
            del self._seats[channel][seat]
            if not self._seats[channel]:
                del self._seats[channel]
            if not seat.is_consumer:
                self._leave_producer(name, channel)
                continue
            group = self.groups[name]
            left.append((name, group.leave(channel)))
            if not group.members:
                self._subscription_bytes -= self.groups.pop(name).subscription_bytes
        # List the remaining channels once per group, however many clients leave it.
        names = {name for name, _ in left}
        staying = {name: tuple(self.groups[name].members) for name in names & self.groups.keys()}
        return [
            GroupChanged(name, staying.get(name, ()), gone.client_id, gone.last_heartbeat_ms)
            for name, gone in left
        ]


def _bytes_of(subscriptions: Sequence[SubscriptionData]) -> int:
    # One heartbeat may have 16,000 of them: no line of Python runs for each.
    tag_sets = list(map(_TAGS, subscriptions))
    texts = chain(chain.from_iterable(map(_TEXTS, subscriptions)), chain.from_iterable(tag_sets))
    tags = sum(map(len, chain(tag_sets, map(_CODES, subscriptions))))
    return len(subscriptions) * _SUBSCRIPTION_BYTES + sum(map(len, texts)) + tags * _TAG_BYTES


class _Sighting(NamedTuple):
    at_ms: int
    is_member: bool


_NEVER: Final = _Sighting(0, is_member=False)


class ConsumerSightings:
    """The consumers that other replicas have seen, and those that left this one, in addition to its
    `clients`."""

    def __init__(self, clients: ConsumerManager) -> None:
        self._clients = clients
        # Group -> client id -> newest sighting; and all sightings in order of arrival.
        self._groups: dict[str, dict[str, _Sighting]] = {}
        self._came: deque[tuple[int, str, str, _Sighting]] = deque()
        self._leads = False
        self._moving_until_ms = 0

    def left(self, group: str, client_id: str, now_ms: int) -> None:
        self._note(group, client_id, _Sighting(now_ms, is_member=False), now_ms)

    def closed(self, group: str, client_id: str, heard_ms: int, now_ms: int) -> None:
        """A client's connection to this replica closed. After a planned switch the client moves to
        another replica. Until then it stays listed, or another client would also read its queues.
        """
        if now_ms < self._moving_until_ms:
            self._note(group, client_id, _Sighting(heard_ms, is_member=True), now_ms)
        else:
            self.left(group, client_id, now_ms)

    def became_master(self) -> None:
        self._leads = True
        self._moving_until_ms = 0

    def role_left(self, now_ms: int) -> None:
        if self._leads:
            self._leads = False
            self._moving_until_ms = now_ms + MOVING_MS

    def learn(self, piece: ConsumerSightingsBody, now_ms: int) -> None:
        for client_id, age_ms in piece.seen.items():
            self._note(piece.group, client_id, _Sighting(now_ms - age_ms, is_member=True), now_ms)
        for client_id, age_ms in piece.left.items():
            self._note(piece.group, client_id, _Sighting(now_ms - age_ms, is_member=False), now_ms)

    def client_ids(self, group: str, now_ms: int) -> list[str]:
        """The sorted ids of the members that are connected here or were seen elsewhere."""
        oldest = now_ms - SIGHTING_MS
        learned = self._groups.get(group, {}).items()
        elsewhere = {id_ for id_, seen in learned if seen.is_member and seen.at_ms > oldest}
        here = self._clients.client_ids(group)
        # Usually no copy is needed: every member asks for the whole list at each rebalance.
        return sorted(elsewhere.union(here)) if elsewhere else here

    def pieces(self, group: str, now_ms: int) -> Iterator[ConsumerSightingsBody]:
        """All that this replica knows of one group, or of all (""), in pieces of PIECE clients."""
        known = self._clients.groups
        # R58: not sorted, since half a million names take half a second.
        names = [group] if group else [*known, *filterfalse(known.__contains__, self._groups)]
        for name in names:
            here = list(known[name].members.values()) if name in known else []
            for start in range(0, len(here), PIECE):
                members = here[start : start + PIECE]
                seen = {one.client_id: now_ms - one.last_heartbeat_ms for one in members}
                yield ConsumerSightingsBody(group=name, seen=seen)
            learned = self._groups.get(name, {})
            # A copy, because the caller builds its answer over several turns. Connected clients
            # are left out in C: the caller pauses after so many clients of its answer.
            connected = set(self._clients.client_ids(name))
            elsewhere = filterfalse(connected.__contains__, list(learned))
            while some := list(islice(elsewhere, PIECE)):
                piece = ConsumerSightingsBody(group=name)
                for client_id in some:
                    at_ms, is_member = learned.get(client_id, _NEVER)
                    if now_ms - at_ms < SIGHTING_MS:
                        (piece.seen if is_member else piece.left)[client_id] = now_ms - at_ms
                yield piece

    def forget(self, now_ms: int) -> bool:
        """Drops a slice of the sightings older than SIGHTING_MS; returns whether there may be
        more."""
        dropped = 0
        while self._came and self._came[0][0] <= now_ms - SIGHTING_MS and dropped < PIECE:
            self._drop_first()
            dropped += 1
        return dropped == PIECE

    def _note(self, group: str, client_id: str, seen: _Sighting, now_ms: int) -> None:
        before = self._groups.get(group, {}).get(client_id)
        if before is not None:
            # The age of a sighting does not count its time on the way, so the same heartbeat,
            # received again, seems newer.
            newer_by = SAME_MS if before.is_member == seen.is_member else 0
            if seen.at_ms <= before.at_ms + newer_by:
                return
        if seen.at_ms <= now_ms - SIGHTING_MS:
            return
        self._groups.setdefault(group, {})[client_id] = seen
        self._came.append((now_ms, group, client_id, seen))
        if len(self._came) > SIGHTINGS_MAX:
            self._drop_first()

    def _drop_first(self) -> None:
        """Drops the oldest sighting, unless a newer one of that client has replaced it."""
        _, group, client_id, seen = self._came.popleft()
        known = self._groups.get(group, {})
        if known.get(client_id) is seen:
            del known[client_id]
            if not known:
                del self._groups[group]
