"""Pauses between retries, and how silence is noticed."""

from batonmq.client.instance.failover import Silence, SilenceWatch, pause_ms

HELD = Silence("T", "a", "h:1", is_held=True)


def test_pauses_start_small_grow_and_are_bounded() -> None:
    pauses = [pause_ms(n) for n in range(1, 100)]
    assert pauses[:9] == [5, 8, 11, 17, 25, 38, 57, 85, 100]
    assert pauses == sorted(pauses)
    assert max(pauses) == 100
    assert sum(pauses[:6]) < 110, "an election is noticed soon after it ended"


def test_silence_is_suspicious_after_its_patience_and_again_later() -> None:
    watch = SilenceWatch()
    assert watch.next_ms() is None
    send = watch.begin(Silence("T", "a", "h:1"), 0, 300, 100)
    held = watch.begin(HELD, 0, 2000, 2000)
    other = watch.begin(Silence("T", "b", "h:2"), 100, 300, 100)
    assert watch.next_ms() == 300
    assert watch.due(299) == []
    assert [s.address for s in watch.due(300)] == ["h:1"]
    assert [s.address for s in watch.due(400)] == ["h:1", "h:2"]
    watch.end(send)
    watch.end(other)
    assert watch.next_ms() == 2000
    assert len(watch.due(2000)) == 1
    assert watch.next_ms() == 4000
    watch.end(held)
    assert watch.next_ms() is None


def test_an_address_is_looked_into_once_for_all_its_requests() -> None:
    watch = SilenceWatch()
    for _ in range(5):
        watch.begin(Silence("T", "a", "h:1"), 0, 300, 100)
    assert len(watch.due(300)) == 1
    assert watch.due(300) == []


def test_a_request_that_is_not_held_has_its_address_looked_into_as_a_suspect() -> None:
    for order in ((True, False), (False, True)):
        watch = SilenceWatch()
        for is_held in order:
            watch.begin(Silence("T", "a", "h:1", is_held=is_held), 0, 300, 300)
        assert [silence.is_held for silence in watch.due(300)] == [False]


def test_a_hung_master_is_noticed_by_each_held_request_that_comes_due() -> None:
    watch = SilenceWatch()
    for began_ms in range(0, 2000, 250):
        watch.begin(HELD, began_ms, 2000, 2000)
    checked_ms = [now_ms for now_ms in range(0, 6001, 50) if watch.due(now_ms)]
    assert checked_ms == list(range(2000, 6001, 250))


def test_held_requests_have_an_address_checked_once_in_a_gap() -> None:
    watch = SilenceWatch()
    for began_ms in range(1000):
        watch.begin(HELD, began_ms, 2000, 2000)
    watch.begin(Silence("T", "b", "h:2", is_held=True), 100, 2000, 2000)
    checked = [(now_ms, s.address) for now_ms in range(4000) for s in watch.due(now_ms)]
    assert [now_ms for now_ms, address in checked if address == "h:1"] == [2000, 2250, 2500, 2750]
    assert [now_ms for now_ms, address in checked if address == "h:2"] == [2100]
