"""Two replicas, any order of events, against a naive model: equal logs, equal queues, no loss.

The model is a list of confirmed bodies for each queue. Master and slave are real stores; what the
HA service would do is done here by hand: ship bytes cut anywhere, confirm the smaller end, kill and
restart either side, and let the other one take over after truncating to the common point.
"""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

QUEUES = 2

steps = st.lists(
    st.sampled_from(
        ["put", "put", "put", "turn", "ship", "ship part", "confirm", "checkpoint", "kill slave",
         "kill master", "switch"]
    ),
    max_size=40,
)  # fmt: skip


class Pair:
    """A master, a slave, and what was confirmed so far."""

    def __init__(self, make_rig, seed):
        self.rigs = [make_rig(), make_rig()]
        self.stores = [rig.open() for rig in self.rigs]
        self.stores[0].prepare_master()
        self.random = random.Random(seed)
        self.in_log = []  # (end offset, queue id, body) of records that the master wrote
        self.confirmed = 0
        self.number = 0

    master = property(lambda self: self.stores[0])
    slave = property(lambda self: self.stores[1])

    def put(self):
        self.number += 1
        body = b"%05d" % self.number + self.random.randbytes(self.random.randrange(1500))
        queue_id = self.random.randrange(QUEUES)
        result = self.rigs[0].put(self.master, body, queue_id=queue_id)
        self.in_log.append((result.end_offset, queue_id, body))

    def turn(self):
        self.master.end_turn()

    def ship(self, size=1 << 20):
        offset = self.slave.max_phy_offset
        while view := self.master.log.view(offset, size):
            offset = self.slave.slave_log.append_replicated(offset, view)
            if size != 1 << 20:
                break
        self.slave.advance_confirm_offset(min(self.confirmed, offset))

    def ship_part(self):
        self.ship(self.random.randrange(1, 3000))

    def confirm(self):
        both = min(self.master.max_phy_offset, self.slave.max_phy_offset)
        self.confirmed = max(self.confirmed, self.master.advance_confirm_offset(both))

    def checkpoint(self):
        for store in self.stores:
            store.checkpoints.flush_derived()

    def kill(self, side):
        self.rigs[side].kill(self.stores[side])
        store = self.stores[side] = self.rigs[side].open()
        assert not store.trust.reason

    def kill_slave(self):
        self.kill(1)

    def kill_master(self):
        self.turn()
        self.kill(0)
        self.switch()

    def switch(self):
        """The slave takes over; the old master cuts what it has beyond it, and follows."""
        self.turn()
        self.master.stop_writes()
        self.rigs.reverse()
        self.stores.reverse()
        log_end = self.master.prepare_master()
        assert log_end >= self.confirmed, "an acknowledged byte is missing"
        self.in_log = [record for record in self.in_log if record[0] <= log_end]
        if self.slave.max_phy_offset > log_end:
            self.slave.slave_log.truncate_to(log_end)
        self.check_common()

    def check_common(self):
        end = min(self.master.max_phy_offset, self.slave.max_phy_offset)
        for offset in range(0, end, 8192):
            size = min(8192, end - offset)
            assert self.master.log.view(offset, size) == self.slave.log.view(offset, size)

    def check_end(self):
        """Everything is shipped and confirmed: both show the same, in order, without a gap."""
        self.turn()
        self.ship()
        self.confirm()
        self.ship()
        self.check_common()
        for store, rig in zip(self.stores, self.rigs, strict=True):
            for queue_id in range(QUEUES):
                expected = [body for _, queue, body in self.in_log if queue == queue_id]
                assert rig.read_bodies(store, "T", queue_id) == expected


@settings(max_examples=20, deadline=None)
@given(steps, st.integers(0, 99))
def test_g3_two_replicas_stay_equal_whatever_happens(rigs_in, events, seed):
    with rigs_in() as make_rig:
        pair = Pair(make_rig, seed)
        for event in events:
            getattr(pair, event.replace(" ", "_"))()
        pair.check_end()
