"""A story's own rules."""

from batonmq.client.instance.failover import LAST_PAUSE_MS
from batonmq.history.story import IDLE_AFTER_MS


def test_a_master_is_idle_when_no_client_tried_within_its_longest_pause():
    assert IDLE_AFTER_MS == LAST_PAUSE_MS
