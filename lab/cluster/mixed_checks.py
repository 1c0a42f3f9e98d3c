"""What a mixed group must hold after a story: nothing acknowledged is lost, and logs are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lab.cluster.connection import ha_status
from lab.cluster.mixed import MixedGroup
from lab.cluster.queues import first_messages
from lab.cluster.stores import log_bytes
from lab.cluster.writer import Writer, number_in, wait_acks


@contextmanager
def steady_load(group: MixedGroup, topic: str, *places: int) -> Iterator[Writer]:
    """Writes to these brokers, all of which are in the set when it begins."""
    addresses = [group.address(place) for place in places]
    with Writer(addresses, topic, 0, pause_s=0.002) as writer:
        wait_acks(writer, 20)
        group.wait_in_sync(*places)
        yield writer


def wait_master(group: MixedGroup, load: Writer, place: int) -> None:
    """Until that broker acknowledges."""
    group.wait_for(f"place {place} as master", lambda: group.master() == place)
    wait_acks(load, 50)


def nothing_lost(group: MixedGroup, load: Writer) -> None:
    """Each acknowledged message is at the master, where its ack said, and no two orders."""
    acks, master = list(load.acks), group.master()
    assert master is not None
    stored = first_messages(group.address(master), load.topic, acks[-1].queue_offset + 1)
    numbers = [number_in(message.body)[1] for message in stored]
    lost = [ack for ack in acks if numbers[ack.queue_offset] != ack.number]
    assert not lost, f"{len(lost)} of {len(acks)} acknowledged messages lost, first {lost[0]}"
    assert numbers == sorted(numbers)


def logs_equal(group: MixedGroup, *places: int) -> int:
    """The logs of these brokers, of which the first is ours, are the same to the byte, and so are
    their epochs, but for some without a byte. Returns where they end. No writes meanwhile."""
    status = ha_status(group.address(places[0]))
    assert status is not None
    end = status.max_offset
    first, *others = places
    for place in others:
        assert log_bytes(group.store(first), end) == log_bytes(group.store(place), end), place
        ours, theirs = group.epochs(first), group.epochs(place)
        starts = {start for _, start in ours} ^ {start for _, start in theirs}
        assert starts <= {end}, (ours, theirs)
        assert set(ours) >= set(theirs) or set(theirs) >= set(ours), (ours, theirs)
    return end
