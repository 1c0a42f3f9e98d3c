"""Events about members of a broker group: who left, returned, restarted, truncated. Pure. The
second half of `history.fold`, with the state that both keep of a group. A handler takes the state,
the event and its decoded detail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from batonmq.history.event import EventDetail, HistoryEvent
from batonmq.history.story import Story
from batonmq.runtime.words import counted, named

ELECTIONS_KEPT: Final = 16
"""Elections of a group to which an event may still belong; older ones are finished."""


@dataclass(slots=True, eq=False)
class GroupTimeline:
    """The open stories of one group: `open` has all, the other fields those that an event can
    continue.

    `elections` by masterEpoch, newest last. `masterless` has no master yet, `switch` no election;
    `absent`, `restarted` and `leaseless` are by the broker that left the set, came back as another
    process, or lost its lease. `incarnations`: the newest one of each broker.
    `controllers_started_ms`: when the controllers were started that lead now, 0 if one led before;
    `started_ms`: the same as of the group's last election."""

    open: list[Story] = field(default_factory=list)
    elections: dict[int, Story] = field(default_factory=dict)
    latest: Story | None = None
    masterless: Story | None = None
    switch: Story | None = None
    absent: dict[int, Story] = field(default_factory=dict)
    restarted: dict[int, Story] = field(default_factory=dict)
    leaseless: dict[int, Story] = field(default_factory=dict)
    incarnations: dict[int, str] = field(default_factory=dict)
    controllers_started_ms: int = 0
    started_ms: int = 0
    begun: int = 0
    looks_at: int = 0  # How many stories may be open before the next look for finished ones.

    def begin(self, kind: str, event: HistoryEvent) -> Story:
        self.begun += 1
        story = Story(kind, event.broker_name, event.master_epoch, event.key, self.begun)
        story.reason = event.reason
        self.open.append(story)
        return story

    def drop(self, story: Story) -> None:
        """Removes an open story whose steps went to another one."""
        self.open = [each for each in self.open if each is not story]

    def take_finished(self, patience: int) -> list[Story]:
        """Removes and returns stories that no event can continue, once there may be more than
        `patience`."""
        if len(self.open) < self.looks_at:
            return []
        # Bounds the memory: what is reported of an older election later is left out.
        while len(self.elections) > ELECTIONS_KEPT:
            del self.elections[next(iter(self.elections))]
        held = set(map(id, self._held()))
        self.looks_at = len(held) + patience + 1 if patience else 0
        if len(held) == len(self.open):
            return []
        finished = [story for story in self.open if id(story) not in held]
        self.open = [story for story in self.open if id(story) in held]
        return finished

    def _held(self) -> Iterator[Story]:
        yield from (each for each in (self.latest, self.masterless, self.switch) if each)
        for stories in (self.elections, self.absent, self.restarted, self.leaseless):
            yield from stories.values()


def set_altered(group: GroupTimeline, event: HistoryEvent, _: EventDetail) -> None:
    before, after = set(event.set_before), set(event.sync_state_set)
    election = group.elections.get(event.master_epoch)
    if election is not None:
        election.at_work = True
    if left := before - after:
        # Until the first ack a member that leaves is a part of the failover: its missing ack may
        # be what delays that.
        waits = election is not None and election.is_election and not election.first_ack_ms
        story = election if waits and election else group.begin("slave_lost", event)
        story.set_before = story.set_before or event.set_before
        text = f"{_brokers(left)} left the set {set_text(event.sync_state_set)}{_why(event)}"
        _change(story, event, "left", text, left)
        members_left(story, group, left)
    joined = (after - before) - members_returned(group, event)
    if joined:
        first = election is not None and election.kind == "first_election"
        story = election if first and election else group.begin("replica_joined", event)
        text = f"{_brokers(joined)} joined the set {set_text(event.sync_state_set)}{_why(event)}"
        _change(story, event, "joined", text, joined)


def members_left(story: Story, group: GroupTimeline, left: set[int]) -> None:
    """What these brokers do belongs to `story` until they return."""
    story.missing |= left
    story.brokers |= left
    for broker_id in left:
        older = group.absent.get(broker_id)
        if older is not None and older is not story:
            older.missing.discard(broker_id)
        group.absent[broker_id] = story


def members_returned(group: GroupTimeline, event: HistoryEvent) -> set[int]:
    """Ends the absence of brokers in the event's new set; returns them."""
    returned = set(event.sync_state_set) & group.absent.keys()
    for broker_id in sorted(returned):
        story = group.absent.pop(broker_id)
        story.missing.discard(broker_id)
        text = f"broker {broker_id} is back in the set {set_text(event.sync_state_set)}"
        _change(story, event, "joined", text + _why(event), {broker_id})
    return returned


def _change(story: Story, event: HistoryEvent, name: str, text: str, who: set[int]) -> None:
    story.brokers |= who
    if event.kind == "set_altered":
        change = (event.time_ms, event.sync_state_set, event.reason)
        if change not in story.set_changes:
            story.set_changes.append(change)
    story.add(name, event.time_ms, event.clock, text, min(who))


def broker_registered(group: GroupTimeline, event: HistoryEvent, _: EventDetail) -> None:
    broker_id = event.broker_id
    known = group.incarnations.get(broker_id)
    group.incarnations[broker_id] = event.incarnation
    # The same process registers again, e.g. with another address; or the history begins later.
    if known is None or known == event.incarnation:
        return
    story = group.absent.get(broker_id) or group.masterless
    if story is None:
        story = group.restarted[broker_id] = group.begin("broker_restarted", event)
    story.brokers |= {broker_id}
    text = f"broker {broker_id} came back as another process"
    story.add("restarted", event.time_ms, event.clock, text, broker_id)


def truncated(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    before, after = detail.from_offset, detail.to_offset
    story = group.absent.get(event.broker_id) or group.elections.get(event.master_epoch)
    if story is None:
        return
    story.truncations.append((event.broker_id, before, after, event.time_ms))
    story.brokers |= {event.broker_id} - {0}
    text = (
        f"broker {event.broker_id} cut {counted(before - after, 'byte')}, from {before} to {after}"
    )
    story.add("truncated", event.time_ms, event.clock, text, event.broker_id)


def diverged(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story = group.absent.get(event.broker_id) or group.begin("diverged", event)
    story.brokers |= {event.broker_id} - {0}
    why = detail.reason or event.reason or "no reason was given"
    text = f"broker {event.broker_id} cannot follow and tries again: {why}"
    story.add("stuck", event.time_ms, event.clock, text, event.broker_id)


def lease_lost(group: GroupTimeline, event: HistoryEvent, _: EventDetail) -> None:
    story = group.absent.get(event.broker_id) or group.begin("lease_lost", event)
    story.brokers |= {event.broker_id} - {0}
    text = f"broker {event.broker_id}, master, had no answer of a leading controller"
    story.add("lease lost", event.time_ms, event.clock, text, event.broker_id)
    overtaken = group.latest is not None and group.latest.master_epoch > event.master_epoch
    if story.kind == "lease_lost" and not overtaken:
        story.waiting = True
        group.leaseless[event.broker_id] = story


def lease_back(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story = group.leaseless.pop(event.broker_id, None)
    if story is None:
        return
    story.waiting = False
    writes = ""
    if detail.writes_refused is False:
        writes = "; it took writes throughout, since its whole set followed it (R36)"
    elif detail.writes_refused:
        writes = "; it refused writes in between, since not its whole set followed it (R36)"
    text = f"broker {event.broker_id} is answered again after {detail.away_ms} ms"
    story.add("lease back", event.time_ms, event.clock, text + writes, event.broker_id)


def broker_cleaned(group: GroupTimeline, event: HistoryEvent, _: EventDetail) -> None:
    gone = set(event.set_before) - set(event.sync_state_set)
    story = group.begin("cleaned", event)
    _change(story, event, "cleaned", f"forgotten: {event.reason}", gone or {0})
    story.brokers.discard(0)
    # The rest says who asked, and may name a user "2".
    what = event.reason.partition(", asked by ")[0]
    words = what.replace(",", " ").split()
    for broker_id in list(group.absent):
        if what == "the whole group" or str(broker_id) in words:
            group.absent.pop(broker_id).missing.discard(broker_id)


def set_text(members: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, members)) + "}"


def _why(event: HistoryEvent) -> str:
    return f" ({event.reason})" if event.kind == "set_altered" and event.reason else ""


def _brokers(broker_ids: set[int]) -> str:
    return named("broker", sorted(broker_ids))
