"""How far each consumer group is behind, for the metrics: one walk over all offsets.

An offline group keeps its lag, also in its retry topic. Origin: ConsumerLagCalculator in Java.
"""

from dataclasses import dataclass

from batonmq.broker.service import BrokerService
from batonmq.broker.tables.consumer_offset import SEPARATOR
from batonmq.runtime.clock import wall_ms
from batonmq.runtime.turns import Pace, copy_of_keys

_Place = tuple[str, int, int]
"""Topic, queue, offset."""


@dataclass(slots=True)
class Lag:
    """Of a group in a topic, over all its queues, in messages. Times are ms."""

    consumed: int = 0
    behind: int = 0
    """From the next message to consume to the ends of the queues."""
    inflight: int = 0
    """Handed out and not acknowledged, by pulls and by POP."""
    ready: int = 0
    """Not handed out yet."""
    oldest_ms: int = 0
    """Age of the next message to consume."""
    oldest_ready_ms: int = 0

    @property
    def waiting(self) -> int:
        return self.inflight + self.ready


Lags = dict[tuple[str, str], Lag]
"""(Group, topic) -> how far it is behind."""


class GroupLags:
    """The lags of one broker's groups; only a master has all that they count."""

    def __init__(self, service: BrokerService) -> None:
        self._tables = service.tables
        self._store = service.store  # opened later than this is made
        self._pull = service.pull
        self._popped = service.features.pop
        self._stored_ms: dict[_Place, int] = {}
        """Store times from the last walk: a message that is still the oldest is not read again."""

    async def measured(self, pace: Pace) -> Lags:
        lags: Lags = {}
        stored_ms: dict[_Place, int] = {}
        now_ms, offsets = wall_ms(), self._tables.offsets
        keys = await copy_of_keys(offsets.table, lambda: offsets.removals)
        keys.reverse()  # the oldest first: beyond the limit of series the newest are left out
        while keys:  # taken out one by one: to free them all at once takes a millisecond
            topic, _, group = keys.pop().partition(SEPARATOR)
            await pace.step()
            # Offsets of a deleted topic, and of single consumers that broadcast.
            if topic not in self._tables.topics or SEPARATOR in group:
                continue
            lag = lags[group, topic] = Lag()
            for queue_id, consumed in offsets.offsets_of(group, topic).items():
                self._add_queue(lag, (group, topic, queue_id), consumed, now_ms, stored_ms)
                await pace.step()
        before, self._stored_ms = self._stored_ms, stored_ms
        while before:  # freed in slices: there is one for each queue of each group
            before.popitem()
            await pace.step()
        return lags

    def _add_queue(
        self,
        lag: Lag,
        place: tuple[str, str, int],
        consumed: int,
        now_ms: int,
        stored_ms: dict[_Place, int],
    ) -> None:
        _, topic, queue_id = place
        end = max(0, self._store.queries.max_offset_in_queue(topic, queue_id))
        # A group may be above the visible end for a moment after a failover (R28).
        consumed = min(max(0, consumed), end)
        handed_out = max(consumed, min(self._pull.pulled.get(place, 0), end))
        lag.consumed += consumed
        lag.behind += end - consumed
        lag.inflight += handed_out - consumed + self._popped.table.in_flight_of(place)
        lag.ready += end - handed_out
        for offset, field in ((consumed, "oldest_ms"), (handed_out, "oldest_ready_ms")):
            if offset < end:
                at = (topic, queue_id, offset)
                stored = stored_ms.get(at) or self._stored_ms.get(at)
                if not stored:
                    stored = self._store.queries.message_store_timestamp(*at)
                stored_ms[at] = stored
                if stored > 0:
                    setattr(lag, field, max(getattr(lag, field), now_ms - stored))
