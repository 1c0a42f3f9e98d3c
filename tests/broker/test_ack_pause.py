"""What a woken master may acknowledge (R8, R36)."""

from batonmq.broker.write.pending_acks import AckPause


class Lease:
    until_ms = 0

    def valid(self, now_ms: int) -> bool:
        return now_ms < self.until_ms


def awake(pause: AckPause, from_ms: int, to_ms: int) -> list[int]:
    """The times, 50 ms apart, at which acks had to wait."""
    return [now_ms for now_ms in range(from_ms, to_ms, 50) if pause.holds(now_ms)]


def test_r8_a_stall_within_the_lease_costs_nothing():
    lease = Lease()
    lease.until_ms = 1_600
    pause = AckPause(lease.valid)
    assert not pause.holds(1_000)
    assert not pause.holds(1_500)


def test_r8_a_stall_begins_at_its_limit():
    pause = AckPause(Lease().valid)
    assert [pause.holds(at_ms) for at_ms in (0, 399, 799)] == [False, False, True]


def test_r36_without_any_controller_acks_go_on_a_second_after_the_stall():
    pause = AckPause(Lease().valid)
    assert not pause.holds(1_000)
    held = awake(pause, 3_000, 6_000)
    assert (held[0], held[-1]) == (3_000, 3_950)


def test_r8_a_second_stall_begins_a_second_pause():
    pause = AckPause(Lease().valid)
    pause.holds(0)
    assert pause.holds(1_000)
    assert pause.holds(1_900)
    assert pause.holds(2_500)
    assert awake(pause, 2_550, 5_000)[-1] == 3_450
