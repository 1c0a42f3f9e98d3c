"""Which brokers each controller hears, and which controller should lead because of that (R50).
Pure.

A leader can be cut off from brokers while it reaches its peers. So each follower reports to the
leader which registered processes it does *not* hear, most often none, and the leader keeps each
peer's newest report. A process that this node does not hear, but a peer does, is *elsewhere*: it
does not count as dead, and the lead is offered to a peer that hears more.

A report names the log entry up to which its sender knew the registrations; it says nothing about a
process that registered later. After `REPORT_MS_MAX` a report does not count: the peer may hang.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from batonmq.controller.liveness import events as ev

REPORT_MS: Final = 200
REPORT_MS_MAX: Final = 600
SETTLE_MS: Final = 500
"""How long a process must be elsewhere before the lead is offered: a broker that was killed is
elsewhere for a moment, since the reports of the peers are older than what this node sees."""
OFFER_PAUSE_MS: Final = 10_000
"""Between two offers of this node: a link that breaks repeatedly must not move the lead each
time."""
URGENT_PAUSE_MS: Final = 1_000
"""The same while a group can have no master as long as this node leads."""


@dataclass(slots=True)
class _Peer:
    index: int
    unheard: frozenset[ev.Process]
    received_ms: int


class Hearing:
    """`now_ms` of all calls is one clock."""

    def __init__(self) -> None:
        self._known: dict[str, dict[ev.Process, int]] = {}
        """By group: the registered processes, and since which log entry each is known."""
        self._unheard: dict[str, frozenset[ev.Process]] = {}
        """By group: those that this node does not hear, where there are some."""
        self._peers: dict[str, _Peer] = {}
        self._elsewhere_ms: dict[str, int] = {}
        """By group: since when some of its processes are elsewhere."""
        self._offered_ms: int | None = None
        self._report: ev.ReportHearing | None = None
        self._changed = False
        """Whether what this node hears has changed since that report."""
        self._reported_ms = 0

    # Registrations, and what this node hears.

    def registered(self, broker_name: str, processes: Collection[ev.Process], index: int) -> None:
        """The group has these processes now, by the log up to entry `index`."""
        known = self._known.get(broker_name, {})
        self._known[broker_name] = {each: known.get(each, index) for each in processes}

    def removed(self, broker_name: str) -> None:
        self._changed = True
        for table in (self._known, self._unheard, self._elsewhere_ms):
            table.pop(broker_name, None)

    def heard(self, broker_name: str, unheard: frozenset[ev.Process]) -> None:
        """Of this group this node hears all registered processes but these."""
        # Called at each check: only a difference is worth a message to the leader.
        if unheard == self._unheard.get(broker_name, frozenset()):
            return
        self._changed = True
        if unheard:
            self._unheard[broker_name] = unheard
        else:
            self._unheard.pop(broker_name, None)

    def report(self, index: int, now_ms: int) -> list[ev.ReportHearing]:
        """What a follower reports to its leader now: a change at once, else every REPORT_MS."""
        last = self._report
        if last is None or self._changed:
            unheard = frozenset[ev.Process]().union(*self._unheard.values())
        elif now_ms - self._reported_ms < REPORT_MS:
            return []
        # Without a change too: after REPORT_MS_MAX the leader drops the last report. This is asked
        # after the check of each group, so the union is not made again.
        else:
            unheard = last.unheard
        self._changed = False
        changed = last is None or last.unheard != unheard
        self._report, self._reported_ms = ev.ReportHearing(index, unheard, changed=changed), now_ms
        return [self._report]

    # What the peers hear.

    def peer_reported(self, event: ev.PeerReported, now_ms: int) -> frozenset[str]:
        """The groups of which that peer hears fewer, or more, processes than in its last report."""
        before = self._peers.get(event.node)
        self._peers[event.node] = _Peer(event.index, event.unheard, now_ms)
        # Only these groups are checked again: a report about a whole cluster must not fill a turn.
        changed = event.unheard ^ (before.unheard if before else frozenset())
        return frozenset(name for name, _, _ in changed)

    def elsewhere(self, processes: Iterable[ev.Process], now_ms: int) -> frozenset[int]:
        """The ids of those `processes` that a peer hears; this node hears none of them."""
        peers = [p for p in self._peers.values() if now_ms - p.received_ms <= REPORT_MS_MAX]
        return frozenset(each[1] for each in processes if any(self._hears(p, each) for p in peers))

    def offer(
        self, broker_name: str, ids: frozenset[int], *, urgent: bool, now_ms: int
    ) -> list[ev.OfferLead]:
        """Offers the lead to the peer that hears most processes, if it hears more than this node.

        `ids` are elsewhere. `urgent`: the group has no master, and only a controller that hears one
        of `ids` can elect one; then it is enough that the peer hears one of them.
        """
        if not ids:
            self._elsewhere_ms.pop(broker_name, None)
            return []
        since_ms = self._elsewhere_ms.setdefault(broker_name, now_ms)
        pause_ms = URGENT_PAUSE_MS if urgent else OFFER_PAUSE_MS
        if now_ms - since_ms < SETTLE_MS:
            return []
        # Two nodes that each miss another broker would hand the lead back and forth.
        if self._offered_ms is not None and now_ms - self._offered_ms < pause_ms:
            return []
        wanted = [each for each in self._known.get(broker_name, {}) if each[1] in ids]
        missed = {
            node: self._missed_by(peer)
            for node, peer in self._peers.items()
            if now_ms - peer.received_ms <= REPORT_MS_MAX
            and any(self._hears(peer, each) for each in wanted)
        }
        # By name in a tie, so that all nodes prefer the same one.
        node = min(missed, key=lambda each: (missed[each], each), default="")
        if not node or not (urgent or missed[node] < sum(map(len, self._unheard.values()))):
            return []
        self._offered_ms = now_ms
        why = f"{node} hears of {broker_name} broker {sorted(ids)}, this node does not"
        return [ev.OfferLead(node, why)]

    def _hears(self, peer: _Peer, process: ev.Process) -> bool:
        # A peer that had not applied the registration yet says nothing of that process.
        since = self._known.get(process[0], {}).get(process)
        return since is not None and since <= peer.index and process not in peer.unheard

    def _missed_by(self, peer: _Peer) -> int:
        groups = self._known.values()
        return sum(not self._hears(peer, each) for known in groups for each in known)
