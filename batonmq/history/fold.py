"""The fold from history events to stories: who was master, what was seen when, what each step took.

`Fold.apply` takes the events in the order of `batonmq.history.merge.in_order` and returns the
stories that they finish: those that no later event can continue. Its memory is bounded: the newest
ELECTIONS_KEPT elections of each group, and one story for each broker that is away. Pure: no clock,
no input or output. The kinds of stories:

| kind | about |
|---|---|
| `first_election` | the first master of a group |
| `failover` | a lost master, and the next one from the SyncStateSet |
| `planned_switch` | a master that drained and handed over (R33) |
| `operator_election` | a master named by hand, without draining |
| `unclean_election` | a master from outside the set, or one that may lack messages (R7) |
| `switch_failed` | a planned switch that did not happen |
| `master_lost` | a lost master without a possible successor, so far |
| `election_blocked` | an election that waits for members or for an operator (R19), so far |
| `slave_lost` | a member that left the set, and its return |
| `replica_joined` | a replica new in the set |
| `broker_restarted` | a process that came back as another incarnation without leaving the set |
| `lease_lost` | a master that no leading controller answered for a while |
| `controller_change` | another leading controller |
| `diverged` | a replica that cannot follow its master, so far |
| `cleaned` | replicas that an operator made the controllers forget |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from batonmq.history import members
from batonmq.history.event import EventDetail, HistoryEvent, refused_ms_of
from batonmq.history.members import GroupTimeline, set_text
from batonmq.history.merge import in_order
from batonmq.history.story import Story
from batonmq.runtime.words import counted


def stories(events: Iterable[HistoryEvent]) -> list[Story]:
    """All stories of `events` (in any order, repeated or with gaps), by their begin."""
    fold = Fold()
    made = [story for event in in_order(events) for story in fold.apply(event)]
    made = [story for story in made + fold.finish() if story.steps]
    return sorted(made, key=lambda each: (each.began_ms, each.first_event[1:], each.number))


def failovers(events: Iterable[HistoryEvent]) -> list[Story]:
    return [story for story in stories(events) if story.is_election]


class Fold:
    """The state of all groups. `patience`: how many stories may be finished and not yet returned;
    looking at each event would take a third of the time."""

    def __init__(self, patience: int = 0) -> None:
        self._patience = patience
        self._groups: dict[str, GroupTimeline] = {}
        self._led_since_ms = 0
        self._started_ms = 0
        """When the present leading controllers were started, if there was no leader before."""

    def apply(self, event: HistoryEvent, detail: EventDetail | None = None) -> list[Story]:
        """Takes the next event; unknown kinds change nothing. `detail`: the event's, if decoded."""
        if event.kind == "controller_leader_changed":
            return [self._leader_changed(event)]
        # A newer controller may write kinds that this version does not know.
        handler = _HANDLERS.get(event.kind)
        if handler is None or not event.broker_name:
            return []
        group = self._groups.get(event.broker_name)
        if group is None:
            group = self._groups[event.broker_name] = GroupTimeline()
        group.controllers_started_ms = self._started_ms
        handler(group, event, event.detail if detail is None else detail)
        return [] if event.kind in _ONLY_ADD else group.take_finished(self._patience)

    def finish(self) -> list[Story]:
        """The stories that later events could have continued."""
        left = [story for group in self._groups.values() for story in group.open]
        self._groups.clear()
        return left

    def latest(self, broker_name: str) -> Story | None:
        group = self._groups.get(broker_name)
        return group.latest if group is not None else None

    def _leader_changed(self, event: HistoryEvent) -> Story:
        story = Story("controller_change", event.broker_name, event.master_epoch, event.key)
        story.reason = event.reason
        story.detected_by, clock = event.node, event.clock
        leads_ms, led_since_ms = event.proposed_ms or event.time_ms, self._led_since_ms
        self._led_since_ms = leads_ms
        again = event.node == event.node_before
        if event.leader_seen_ms:
            # An older time is of a leader before the lost one and shows nothing.
            if event.leader_seen_ms >= led_since_ms:
                text = f"controller {event.node} last heard of {event.node_before or 'a leader'}"
                if again:
                    text = f"controller {event.node}, which led, was last answered by a majority"
                story.add("leader known", event.leader_seen_ms, clock, text)
        elif event.started_ms and event.node_before:
            self._started_ms = event.started_ms
            text = f"process of controller {event.node} was started, and knew of no leader since"
            story.add("started", event.started_ms, clock, text)
        before = f" after {event.node_before}" if event.node_before else ", the first of this log"
        how = " again" if again else before
        text = f"controller {event.node} decides{how}, controller epoch {event.controller_epoch}"
        if event.node_before and not story.steps:
            text += "; since when none decided is not recorded"
        story.add("leads", leads_ms, clock, text)
        return story


def _elected(group: GroupTimeline, event: HistoryEvent, _: EventDetail) -> None:
    story = group.masterless or _switch_to(group, event) or group.begin("failover", event)
    restarted = group.restarted.pop(event.master_before, None)
    if restarted is not None and not event.unclean:
        story.absorb(restarted)
        group.drop(restarted)
    # Restarts of other brokers before this election are no part of what follows.
    group.restarted.clear()
    _mark_unwatched(group, story, event)
    # If the master was lost without a successor, that was seen before (`_election_failed`).
    if not story.detected_ms:
        _detected(story, event, event.master_before)
    elif event.detected_ms:
        text = f"an election is possible again: {_how(event, 0)}"
        story.add("possible", event.detected_ms, event.clock, text)
    story.kind = _election_kind(story, event)
    story.master_epoch, story.winner = event.master_epoch, event.broker_id
    story.elected_by = event.key
    # The first one counts: a deposed group has no master before its next election.
    story.master_before = story.master_before or event.master_before
    story.address, story.unclean = event.address, event.unclean
    story.set_before = story.set_before or event.set_before
    story.sync_state_set = event.sync_state_set
    story.brokers |= {event.broker_id, event.master_before} - {0}
    text = (
        f"broker {event.broker_id} at {event.address or '?'} as master of epoch "
        f"{event.master_epoch}, set {set_text(event.set_before)} -> "
        f"{set_text(event.sync_state_set)}"
    )
    if event.unclean:
        text += "; UNCLEAN: acknowledged messages that it lacks are lost"
    story.add("proposed", event.proposed_ms or event.time_ms, event.clock, text)
    if _follow_latest(group, story, story.detected_ms) and group.latest is not None:
        group.latest.overtaken = True
    group.latest = story
    group.elections.pop(event.master_epoch, None)
    group.elections[event.master_epoch] = story
    group.masterless = group.switch = None
    _end_leases(group, event)
    members.members_left(story, group, set(event.set_before) - set(event.sync_state_set))
    members.members_returned(group, event)


def _follow_latest(group: GroupTimeline, story: Story, lost_ms: int) -> bool:
    """Links the story to the election before it. Whether that one's outage continues here."""
    before = group.latest
    story.lost_since_ms = 0
    if before is None or before is story:
        return False
    before.next = story
    if not before.is_election or before.served_until(lost_ms):
        return False
    story.lost_since_ms = before.lost_since_ms or before.detected_ms
    return True


def _end_leases(group: GroupTimeline, event: HistoryEvent) -> None:
    for leaseless in group.leaseless.values():
        text = f"broker {event.broker_id} is elected in masterEpoch {event.master_epoch}"
        leaseless.add("replaced", event.proposed_ms or event.time_ms, event.clock, text)
        leaseless.waiting = False
    group.leaseless.clear()


def _mark_unwatched(group: GroupTimeline, story: Story, event: HistoryEvent) -> None:
    """Marks the first election after all controllers were started: none watched before."""
    started_ms, known_ms = group.controllers_started_ms, group.started_ms
    group.started_ms = started_ms
    began_ms = story.detected_ms or event.detected_ms
    soon = 0 <= began_ms - started_ms <= _SOON_MS
    if started_ms != known_ms and soon and event.master_epoch > 1:
        story.blind_until_ms = started_ms


def _detected(story: Story, event: HistoryEvent, master: int) -> None:
    story.reason, story.how = event.reason, _how(event, master)
    story.detected_by, story.silent_ms = event.node, event.silent_ms
    by = f", seen by controller {event.node}" if event.node else ""
    story.add("detected", event.detected_ms, event.clock, story.how + by, master)


def _switch_to(group: GroupTimeline, event: HistoryEvent) -> Story | None:
    switch = group.switch
    return switch if switch is not None and event.broker_id in switch.brokers else None


def _election_failed(group: GroupTimeline, event: HistoryEvent, _: EventDetail) -> None:
    story = group.masterless
    if story is None:
        story = group.masterless = group.begin("master_lost", event)
        _detected(story, event, event.master_before)
        story.master_before, story.set_before = event.master_before, event.set_before
        _follow_latest(group, story, story.detected_ms or event.proposed_ms or event.time_ms)
    story.kind = "master_lost"
    story.master_epoch = event.master_epoch
    story.brokers |= {event.master_before} - {0}
    group.elections[event.master_epoch] = story
    # The reason begins with what was seen, which `_detected` shows.
    why = event.reason.partition(": ")[2] or event.reason or "no candidate"
    text = f"broker {event.master_before} is deposed, no replica may follow: {why}"
    story.add("failed", event.proposed_ms or event.time_ms, event.clock, text)


def _election_blocked(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story = group.masterless
    latest = group.latest
    if story is None and latest is not None and latest.master_epoch > event.master_epoch:
        story = latest  # the note came late: the election it waited for came first
    if story is None:
        story = group.masterless = group.begin("election_blocked", event)
        _follow_latest(group, story, event.time_ms)
    who = "an operator has to decide" if detail.operator else "waiting for members"
    text = f"{who}: {event.reason or 'unknown'}"
    story.add("blocked", event.time_ms, event.clock, text)


def _pushed(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    # A note of an election that is too old, or of which the event is missing, explains nothing.
    story = group.elections.get(event.master_epoch)
    if story is None or not story.is_election:
        return
    text = "in the log of a majority, applied here"
    story.add("committed", detail.applied_ms, event.clock, text)
    text = f"the new view left for {counted(detail.sessions, 'broker')}"
    story.add("pushed", event.time_ms, event.clock, text)


def _role_changed(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story = group.elections.get(event.master_epoch)
    if story is not None and detail.role.upper() == "MASTER":
        if event.broker_id == story.winner:
            text = f"broker {event.broker_id} took the view"
            story.add("role changed", event.time_ms, event.clock, text, event.broker_id)
    elif (lost := group.absent.get(event.broker_id)) is not None:
        role = detail.role.lower() or "another role"
        text = f"broker {event.broker_id} is {role} in epoch {event.master_epoch}"
        lost.add("follows", event.time_ms, event.clock, text, event.broker_id)


def _opened(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story = _of_winner(group, event)
    if story is not None:
        if not story.opened_ms and event.time_ms > 0:
            story.opened_offset = detail.max_offset
            story.confirmed_offset = max(story.confirmed_offset, detail.confirm_offset)
            story.offsets_clamped = detail.offsets_clamped
        text = f"broker {event.broker_id or story.winner} takes writes"
        if detail.offsets_clamped:
            text += (
                f"; {detail.offsets_clamped} offsets of groups lay above the end of their queue "
                "and were set to it"
            )
        story.add("opened", event.time_ms, event.clock, text, event.broker_id)


def _first_ack(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story = _of_winner(group, event)
    if story is None:
        return
    if not story.first_ack_ms and event.time_ms > 0:
        story.confirmed_offset = max(story.confirmed_offset, detail.confirm_offset)
    text = f"broker {event.broker_id or story.winner}: a write is on every member of the set"
    story.add("first ack", event.time_ms, event.clock, text, event.broker_id)
    if story.first_ack_ms == event.time_ms:
        story.waited_ms = detail.waited_ms


def _of_winner(group: GroupTimeline, event: HistoryEvent) -> Story | None:
    story = group.elections.get(event.master_epoch)
    return story if story is not None and event.broker_id in (0, story.winner) else None


def _switch_requested(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story = _election_after(group, event.master_epoch, event.broker_id)
    if story is None:
        story = group.switch = group.begin("planned_switch", event)
    story.kind = "planned_switch"
    story.brokers |= {event.broker_id, detail.master} - {0}
    story.refused_ms = refused_ms_of(event.reason)
    why = f": {event.reason}" if event.reason else ""
    text = f"hand over to broker {event.broker_id}{why}"
    story.add("requested", event.time_ms, event.clock, text, event.broker_id)


def _drained(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    drainer = group.elections.get(event.master_epoch)
    if drainer is not None and drainer.winner == event.broker_id:
        drainer.at_work = True
    story = group.switch
    if story is None:
        latest = group.latest
        story = latest if latest and latest.master_before == event.broker_id else None
    if story is None:
        story = group.switch = group.begin("planned_switch", event)
    story.kind = "planned_switch"
    story.held_ms, story.drained_offset = detail.held_ms, detail.drained_offset
    story.brokers |= {event.broker_id, detail.target} - {0}
    held = f" after {story.held_ms} ms of holding writes" if story.held_ms >= 0 else ""
    text = f"broker {event.broker_id} drained up to {story.drained_offset}{held}"
    story.add("drained", event.time_ms, event.clock, text, event.broker_id)


def _switch_failed(group: GroupTimeline, event: HistoryEvent, detail: EventDetail) -> None:
    story, group.switch = group.switch or group.begin("switch_failed", event), None
    story.kind, story.reason = "switch_failed", event.reason or detail.reason
    text = f"no switch: {story.reason or 'no reason was given'}; the master stays"
    story.add("failed", event.time_ms, event.clock, text, event.broker_id)


def _election_after(group: GroupTimeline, epoch: int, winner: int) -> Story | None:
    """The election that a request of `epoch` led to, if its event came before the request's."""
    later = [each for each in group.elections if each > epoch]
    story = group.elections[min(later)] if later else None
    return story if story is not None and story.winner == winner else None


_HANDLERS: Final[dict[str, Callable[[GroupTimeline, HistoryEvent, EventDetail], None]]] = {
    "elected": _elected,
    "election_failed": _election_failed,
    "election_blocked": _election_blocked,
    "pushed": _pushed,
    "role_changed": _role_changed,
    "opened": _opened,
    "first_ack": _first_ack,
    "switch_requested": _switch_requested,
    "drained": _drained,
    "switch_failed": _switch_failed,
    "set_altered": members.set_altered,
    "broker_registered": members.broker_registered,
    "truncated": members.truncated,
    "diverged": members.diverged,
    "lease_lost": members.lease_lost,
    "lease_back": members.lease_back,
    "broker_cleaned": members.broker_cleaned,
}

_ONLY_ADD: Final = frozenset({"pushed", "role_changed", "opened", "first_ack", "truncated"})
"""Kinds that begin and end no story."""

_HOW: Final = {
    "session_closed": "the session of {who} closed without a goodbye",
    "session_silent": "{who} fell silent",
    "channel_closed": "the connection of {who} closed",
    "heartbeat_silent": "{who} sent no heartbeat",
    "goodbye": "{who} said goodbye: a planned stop",
    "master_restarted": "{who} came back as another process, so its mastership is over (R3)",
    "never_seen": "{who} was not heard of since this controller decides",
    "no_master": "there is no master",
    "first_election": "the group never had a master",
    "planned switch": "the master has drained and asks for its successor",
}
"""Reason of an election -> how it was seen; `{who}` is the lost master."""

_SOON_MS: Final = 30_000  # After so long a new controller has judged all its brokers.
_BY_HAND: Final = ("named ", "asked by ")
"""How the reason of a requested election begins if there was a master."""


def _how(event: HistoryEvent, master: int) -> str:
    """How the need was seen, as a sentence; unknown reasons as they are."""
    reason, _, why = event.reason.partition(": ")
    how = _HOW.get(reason)
    if how is None:
        reason = reason if event.kind == "election_failed" else event.reason
        return reason or "an election was asked for"
    if reason == "goodbye" and why and event.kind == "elected":
        # The broker's own words: braces in them are no places for values.
        how = "{who} said goodbye, as " + why.replace("{", "{{").replace("}", "}}")
    who = f"broker {master}" if master else "the master"
    silent = f", its last word {event.silent_ms} ms before" if event.silent_ms > 0 else ""
    return how.format(who=who) + (silent if "{who}" in how else "")


def _election_kind(story: Story, event: HistoryEvent) -> str:
    if event.unclean:
        return "unclean_election"
    if story.kind == "planned_switch":
        return story.kind
    if not event.set_before and not event.master_before and event.master_epoch <= 1:
        return "first_election"
    by_hand = event.master_before > 0 and event.reason.startswith(_BY_HAND)
    return "operator_election" if by_hand else "failover"
