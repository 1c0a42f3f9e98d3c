"""The failover history as stories: who was master, what was seen when, how long each step took.

Pure: the controllers' history events (their JSON form, in any order, repeated or with gaps) become
`Story` objects, oldest first. `mqctl timeline` and `batonmq demo` print them. The kinds:

| kind | tells of |
|---|---|
| `first_election` | the first master of a group |
| `failover` | a master lost, and the next one from the SyncStateSet |
| `planned_switch` | a master that drained and handed over (R33) |
| `operator_election` | a master named by hand, without draining |
| `unclean_election` | a master from outside the set, or one that may lack messages (R7) |
| `switch_failed` | a planned switch that did not come about |
| `master_lost` | a master lost and nobody who may follow it, so far |
| `election_blocked` | an election that waits for members or for an operator (R19), so far |
| `slave_lost` | a member that left the set, and its return |
| `replica_joined` | a replica new in the set |
| `broker_restarted` | a process that came back as another incarnation without leaving the set |
| `lease_lost` | a master that no leading controller answered for a while |
| `controller_change` | another leading controller |
| `diverged` | a replica that cannot follow until an operator has looked |
| `cleaned` | replicas that an operator made the controllers forget |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from batonmq.history_events import Happening, happenings
from batonmq.timeline_story import Step, Story, ids

__all__ = ["HOW", "Step", "Story", "failovers", "stories"]


def stories(events: Iterable[Mapping[str, Any]]) -> list[Story]:
    """All stories in `events`, in the order in which they began."""
    teller = _Teller()
    for event in happenings(events):
        teller.tell(event)
    return sorted((story for story in teller.stories if story.steps), key=lambda s: s.began_ms)


def failovers(events: Iterable[Mapping[str, Any]]) -> list[Story]:
    """The stories that ended in a new master."""
    return [story for story in stories(events) if story.is_election]


@dataclass(slots=True)
class _Group:
    """Where the story of one group stands.

    `masterless` waits for its master, `switch` for its election, `absent` for the return of the
    broker by that id, `leaseless` for its lease; `lives` holds each broker's newest incarnation.
    `anew_ms`: from which start of the controllers its first election was told already.
    """

    elections: dict[int, Story] = field(default_factory=dict)
    latest: Story | None = None
    masterless: Story | None = None
    switch: Story | None = None
    absent: dict[int, Story] = field(default_factory=dict)
    restarted: dict[int, Story] = field(default_factory=dict)
    leaseless: dict[int, Story] = field(default_factory=dict)
    lives: dict[int, str] = field(default_factory=dict)
    anew_ms: int = 0


class _Teller:
    def __init__(self) -> None:
        self.stories: list[Story] = []
        self._groups: dict[str, _Group] = {}
        self._led_since_ms = 0
        self._anew_ms = 0

    def tell(self, event: Happening) -> None:
        """Takes the next event in; what it does not know it leaves out."""
        if event.kind == "controller_leader_changed":
            self._leader_changed(event)
            return
        tell = _TOLD_BY.get(event.kind)
        if tell is not None and event.broker_name:
            tell(self, event, self._groups.setdefault(event.broker_name, _Group()))

    def _begin(self, kind: str, event: Happening) -> Story:
        story = Story(kind, event.broker_name, event.master_epoch, reason=event.reason)
        self.stories.append(story)
        return story

    # --- elections ---

    def _elected(self, event: Happening, group: _Group) -> None:
        story = group.masterless or self._switch_to(event, group) or self._begin("failover", event)
        restarted = group.restarted.pop(event.master_before, None)
        if restarted is not None and restarted in self.stories and not event.unclean:
            story.steps += restarted.steps
            self.stories.remove(restarted)
        self._begun_anew(story, event, group)
        detected_again = bool(story.detected_ms)
        if not detected_again:
            self._detected(story, event, event.master_before)
        elif event.detected_ms:
            text = f"an election is possible again: {_how(event, 0)}"
            story.add("possible", event.detected_ms, event.clock, text)
        story.kind = _election_kind(story, event)
        story.master_epoch, story.winner = event.master_epoch, event.broker_id
        story.master_before = story.master_before or event.master_before
        story.address, story.unclean = event.address, event.unclean
        story.set_before = story.set_before or event.set_before
        story.sync_state_set = event.sync_state_set
        story.brokers |= {event.broker_id, event.master_before} - {0}
        text = (
            f"broker {event.broker_id} at {event.address or '?'} as master of epoch "
            f"{event.master_epoch}, set {ids(event.set_before)} -> {ids(event.sync_state_set)}"
        )
        if event.unclean:
            text += "; UNCLEAN: acknowledged messages that it lacks are lost"
        story.add("proposed", event.proposed_ms or event.time_ms, event.clock, text)
        before = group.latest
        if before is not None and before.is_election and not before.served_until(story.detected_ms):
            before.overtaken = before is not story
            story.lost_since_ms = before.lost_since_ms or before.detected_ms
        group.elections[event.master_epoch] = group.latest = story
        group.masterless = group.switch = None
        for leaseless in group.leaseless.values():
            text = f"broker {event.broker_id} is elected in masterEpoch {event.master_epoch}"
            leaseless.add("replaced", event.proposed_ms or event.time_ms, event.clock, text)
            leaseless.waiting = False
        group.leaseless.clear()
        self._members_left(story, group, set(event.set_before) - set(event.sync_state_set))
        self._members_back(story, group, set(event.sync_state_set), event)

    def _begun_anew(self, story: Story, event: Happening, group: _Group) -> None:
        """The first election after all controllers were started: nobody saw how long it was due."""
        anew_ms, told_ms, group.anew_ms = self._anew_ms, group.anew_ms, self._anew_ms
        began_ms = story.detected_ms or event.detected_ms
        soon = 0 <= began_ms - anew_ms <= _SOON_MS
        if anew_ms != told_ms and soon and event.master_epoch > 1:
            story.blind_until_ms = anew_ms

    def _detected(self, story: Story, event: Happening, master: int) -> None:
        story.reason, story.how = event.reason, _how(event, master)
        story.detected_by, story.silent_ms = event.node, event.silent_ms
        by = f", seen by controller {event.node}" if event.node else ""
        story.add("detected", event.detected_ms, event.clock, story.how + by, master)

    def _switch_to(self, event: Happening, group: _Group) -> Story | None:
        switch = group.switch
        return switch if switch is not None and event.broker_id in switch.brokers else None

    def _election_failed(self, event: Happening, group: _Group) -> None:
        story = group.masterless
        if story is None:
            story = group.masterless = self._begin("master_lost", event)
            self._detected(story, event, event.master_before)
            story.master_before, story.set_before = event.master_before, event.set_before
        story.kind = "master_lost"
        story.master_epoch = event.master_epoch
        story.brokers |= {event.master_before} - {0}
        group.elections[event.master_epoch] = story
        why = event.reason.partition(": ")[2] or event.reason or "no candidate"
        text = f"broker {event.master_before} is deposed, nobody may follow: {why}"
        story.add("failed", event.proposed_ms or event.time_ms, event.clock, text)

    def _election_blocked(self, event: Happening, group: _Group) -> None:
        story = group.masterless
        latest = group.latest
        if story is None and latest is not None and latest.master_epoch > event.master_epoch:
            story = latest  # told a little late: the election it waited for came first
        if story is None:
            story = group.masterless = self._begin("election_blocked", event)
        operator = event.detail.get("operator") is True
        who = "an operator has to decide" if operator else "waiting for members"
        story.add("blocked", event.time_ms, event.clock, f"{who}: {event.reason or 'unknown'}")

    def _pushed(self, event: Happening, group: _Group) -> None:
        story = group.elections.get(event.master_epoch)
        if story is None or not story.is_election:
            return
        applied_ms = event.number("appliedMs")
        story.add("committed", applied_ms, event.clock, "in the log of a majority, applied here")
        text = f"the new view left for {event.number('sessions')} brokers"
        story.add("pushed", event.time_ms, event.clock, text)

    def _role_changed(self, event: Happening, group: _Group) -> None:
        story = group.elections.get(event.master_epoch)
        if story is not None and event.text("role").upper() == "MASTER":
            if event.broker_id == story.winner:
                text = f"broker {event.broker_id} took the view"
                story.add("role changed", event.time_ms, event.clock, text, event.broker_id)
        elif (lost := group.absent.get(event.broker_id)) is not None:
            role = event.text("role").lower() or "another role"
            text = f"broker {event.broker_id} is {role} in epoch {event.master_epoch}"
            lost.add("follows", event.time_ms, event.clock, text, event.broker_id)

    def _opened(self, event: Happening, group: _Group) -> None:
        self._of_winner(event, group, "opened", "takes writes")

    def _first_ack(self, event: Happening, group: _Group) -> None:
        story = self._of_winner(event, group, "first ack", "a write is on every member of the set")
        if story is not None and story.first_ack_ms == event.time_ms:
            story.waited_ms = event.number("waitedMs", -1)

    def _of_winner(self, event: Happening, group: _Group, name: str, text: str) -> Story | None:
        story = group.elections.get(event.master_epoch)
        if story is None or event.broker_id not in (0, story.winner):
            return None
        who = f"broker {event.broker_id or story.winner}"
        text = f"{who} {text}" if name == "opened" else f"{who}: {text}"
        story.add(name, event.time_ms, event.clock, text, event.broker_id)
        return story

    # --- planned switches ---

    def _switch_requested(self, event: Happening, group: _Group) -> None:
        story = self._election_after(event.master_epoch, event.broker_id, group)
        if story is None:
            story = group.switch = self._begin("planned_switch", event)
        story.kind = "planned_switch"
        story.brokers |= {event.broker_id, event.number("master")} - {0}
        why = f": {event.reason}" if event.reason else ""
        text = f"hand over to broker {event.broker_id}{why}"
        story.add("requested", event.time_ms, event.clock, text, event.broker_id)

    def _drained(self, event: Happening, group: _Group) -> None:
        story = group.switch
        if story is None:
            latest = group.latest
            story = latest if latest and latest.master_before == event.broker_id else None
        if story is None:
            story = group.switch = self._begin("planned_switch", event)
        story.kind = "planned_switch"
        story.held_ms = event.number("heldMs", -1)
        story.drained_offset = event.number("drainedOffset", -1)
        story.brokers |= {event.broker_id} - {0}
        held = f" after {story.held_ms} ms of holding writes" if story.held_ms >= 0 else ""
        text = f"broker {event.broker_id} drained up to {story.drained_offset}{held}"
        story.add("drained", event.time_ms, event.clock, text, event.broker_id)

    def _switch_failed(self, event: Happening, group: _Group) -> None:
        story, group.switch = group.switch or self._begin("switch_failed", event), None
        story.kind, story.reason = "switch_failed", event.reason or event.text("reason")
        text = f"no switch: {story.reason or 'no reason was given'}; the master stays"
        story.add("failed", event.time_ms, event.clock, text, event.broker_id)

    def _election_after(self, epoch: int, winner: int, group: _Group) -> Story | None:
        """The election that a request of `epoch` led to, if it is told already."""
        later = [each for each in group.elections if each > epoch]
        story = group.elections[min(later)] if later else None
        return story if story is not None and story.winner == winner else None

    # --- members ---

    def _set_altered(self, event: Happening, group: _Group) -> None:
        before, after = set(event.set_before), set(event.sync_state_set)
        election = group.elections.get(event.master_epoch)
        waiting = election is not None and election.is_election and not election.first_ack_ms
        if left := before - after:
            story = election if waiting and election else self._begin("slave_lost", event)
            story.set_before = story.set_before or event.set_before
            text = f"{_brokers(left)} left the set {ids(event.sync_state_set)}{_why(event)}"
            self._change(story, event, "left", text, left)
            self._members_left(story, group, left)
        self._members_back(election, group, after, event, after - before)

    def _members_left(self, story: Story, group: _Group, left: set[int]) -> None:
        story.missing |= left
        story.brokers |= left
        for broker_id in left:
            older = group.absent.get(broker_id)
            if older is not None and older is not story:
                older.missing.discard(broker_id)
            group.absent[broker_id] = story

    def _members_back(
        self,
        election: Story | None,
        group: _Group,
        members: set[int],
        event: Happening,
        joined: set[int] | None = None,
    ) -> None:
        for broker_id in sorted(members & group.absent.keys()):
            story = group.absent.pop(broker_id)
            story.missing.discard(broker_id)
            text = f"broker {broker_id} is back in the set {ids(event.sync_state_set)}"
            self._change(story, event, "joined", text + _why(event), {broker_id})
            joined = (joined or set()) - {broker_id}
        if joined:
            first = election is not None and election.kind == "first_election"
            story = election if first and election else self._begin("replica_joined", event)
            text = f"{_brokers(joined)} joined the set {ids(event.sync_state_set)}{_why(event)}"
            self._change(story, event, "joined", text, joined)

    def _change(self, story: Story, event: Happening, name: str, text: str, who: set[int]) -> None:
        story.brokers |= who
        if event.kind == "set_altered":
            change = (event.time_ms, event.sync_state_set, event.reason)
            if change not in story.set_changes:
                story.set_changes.append(change)
        story.add(name, event.time_ms, event.clock, text, min(who))

    def _registered(self, event: Happening, group: _Group) -> None:
        broker_id = event.broker_id
        known = group.lives.get(broker_id)
        group.lives[broker_id] = event.incarnation
        if known is None or known == event.incarnation:
            return
        story = group.absent.get(broker_id) or group.masterless
        if story is None:
            story = group.restarted[broker_id] = self._begin("broker_restarted", event)
        story.brokers |= {broker_id}
        text = f"broker {broker_id} came back as another process"
        story.add("restarted", event.time_ms, event.clock, text, broker_id)

    def _truncated(self, event: Happening, group: _Group) -> None:
        before, after = event.number("fromOffset"), event.number("toOffset")
        story = group.absent.get(event.broker_id) or group.elections.get(event.master_epoch)
        if story is None:
            return
        story.truncations.append((event.broker_id, before, after, event.time_ms))
        story.brokers |= {event.broker_id} - {0}
        text = f"broker {event.broker_id} cut {before - after} bytes, from {before} to {after}"
        story.add("truncated", event.time_ms, event.clock, text, event.broker_id)

    def _diverged(self, event: Happening, group: _Group) -> None:
        story = group.absent.get(event.broker_id) or self._begin("diverged", event)
        story.brokers |= {event.broker_id} - {0}
        why = event.text("reason") or event.reason or "no reason was given"
        text = f"broker {event.broker_id} cannot follow until an operator has looked: {why}"
        story.add("diverged", event.time_ms, event.clock, text, event.broker_id)

    def _lease_lost(self, event: Happening, group: _Group) -> None:
        story = group.absent.get(event.broker_id) or self._begin("lease_lost", event)
        story.brokers |= {event.broker_id} - {0}
        text = f"broker {event.broker_id}, master, had no answer of a leading controller"
        story.add("lease lost", event.time_ms, event.clock, text, event.broker_id)
        overtaken = group.latest is not None and group.latest.master_epoch > event.master_epoch
        if story.kind == "lease_lost" and not overtaken:
            story.waiting = True
            group.leaseless[event.broker_id] = story

    def _lease_back(self, event: Happening, group: _Group) -> None:
        story = group.leaseless.pop(event.broker_id, None)
        if story is None:
            return
        story.waiting = False
        writes = ""
        if event.detail.get("writesRefused") is False:
            writes = "; it took writes throughout, since its whole set followed it (R36)"
        elif event.detail.get("writesRefused") is True:
            writes = "; it refused writes in between, since not its whole set followed it (R36)"
        text = f"broker {event.broker_id} is answered again after {event.number('awayMs')} ms"
        story.add("lease back", event.time_ms, event.clock, text + writes, event.broker_id)

    def _cleaned(self, event: Happening, group: _Group) -> None:
        gone = set(event.set_before) - set(event.sync_state_set)
        story = self._begin("cleaned", event)
        self._change(story, event, "cleaned", f"forgotten: {event.reason}", gone or {0})
        story.brokers.discard(0)
        for broker_id in list(group.absent):
            if event.reason == "the whole group" or f"{broker_id}" in _numbers(event.reason):
                group.absent.pop(broker_id).missing.discard(broker_id)

    # --- controllers ---

    def _leader_changed(self, event: Happening) -> None:
        story = self._begin("controller_change", event)
        story.detected_by, clock = event.node, event.clock
        leads_ms, led_since_ms = event.proposed_ms or event.time_ms, self._led_since_ms
        self._led_since_ms = leads_ms
        again = event.node == event.node_before
        if event.leader_seen_ms:
            # An older sight is of a leader before the one that was lost: it says nothing.
            if event.leader_seen_ms >= led_since_ms:
                text = f"controller {event.node} last heard of {event.node_before or 'a leader'}"
                if again:
                    text = f"controller {event.node}, which led, was last answered by a majority"
                story.add("leader known", event.leader_seen_ms, clock, text)
        elif event.started_ms and event.node_before:
            self._anew_ms = event.started_ms
            text = f"process of controller {event.node} was started, and knew of no leader since"
            story.add("started", event.started_ms, clock, text)
        before = f" after {event.node_before}" if event.node_before else ", the first of this log"
        how = " again" if again else before
        text = f"controller {event.node} decides{how}, controller epoch {event.controller_epoch}"
        if event.node_before and not story.steps:
            text += "; since when nobody did is not recorded"
        story.add("leads", leads_ms, clock, text)


_TOLD_BY: Final[dict[str, Callable[[_Teller, Happening, _Group], None]]] = {
    "elected": _Teller._elected,
    "election_failed": _Teller._election_failed,
    "election_blocked": _Teller._election_blocked,
    "pushed": _Teller._pushed,
    "role_changed": _Teller._role_changed,
    "opened": _Teller._opened,
    "first_ack": _Teller._first_ack,
    "switch_requested": _Teller._switch_requested,
    "drained": _Teller._drained,
    "switch_failed": _Teller._switch_failed,
    "set_altered": _Teller._set_altered,
    "broker_registered": _Teller._registered,
    "truncated": _Teller._truncated,
    "diverged": _Teller._diverged,
    "lease_lost": _Teller._lease_lost,
    "lease_back": _Teller._lease_back,
    "broker_cleaned": _Teller._cleaned,
}

HOW: Final = {
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
"""Reason of an election -> how it was seen, as a sentence; `{who}` is the master that was lost."""


_SOON_MS: Final = 30_000
"""A controller that starts judges its brokers by then."""
_BY_HAND: Final = ("named ", "asked by remoting")
"""How the reason of an election begins that somebody asked for while there was a master."""


def _how(event: Happening, master: int) -> str:
    """How the need was seen, as a sentence; a reason that is not known here is told as it is."""
    reason, _, why = event.reason.partition(": ")
    how = HOW.get(reason)
    if how is None:
        reason = reason if event.kind == "election_failed" else event.reason
        return reason or "an election was asked for"
    if reason == "goodbye" and why and event.kind == "elected":
        how = "{who} said goodbye, as " + why.replace("{", "{{").replace("}", "}}")
    who = f"broker {master}" if master else "the master"
    silent = f", its last word {event.silent_ms} ms before" if event.silent_ms > 0 else ""
    return how.format(who=who) + (silent if "{who}" in how else "")


def _election_kind(story: Story, event: Happening) -> str:
    if event.unclean:
        return "unclean_election"
    if story.kind == "planned_switch":
        return story.kind
    if not event.set_before and not event.master_before and event.master_epoch <= 1:
        return "first_election"
    by_hand = event.master_before > 0 and event.reason.startswith(_BY_HAND)
    return "operator_election" if by_hand else "failover"


def _why(event: Happening) -> str:
    return f" ({event.reason})" if event.kind == "set_altered" and event.reason else ""


def _brokers(broker_ids: set[int]) -> str:
    many = "s" if len(broker_ids) > 1 else ""
    return f"broker{many} {', '.join(map(str, sorted(broker_ids)))}"


def _numbers(text: str) -> list[str]:
    return text.replace(",", " ").split()
