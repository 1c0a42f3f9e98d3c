"""Looking up the other nodes never holds up the thread that keeps the lead."""

import threading

import pysyncobj.dns_resolver
from pysyncobj.node import TCPNode

from batonmq.controller.raft.transport import BackgroundResolver, install
from tests.shared.no_threads import no_new_threads


def looked_up(host: str) -> None:
    """Returns when the look-up of `host` under way has ended."""
    for thread in threading.enumerate():
        if thread.name == f"resolve-{host}":
            thread.join()


def test_an_address_is_its_own_answer():
    def look_up(host: str) -> str:
        raise AssertionError(host)

    resolver = BackgroundResolver(look_up)
    assert resolver.resolve("127.0.0.1") == "127.0.0.1"
    assert resolver.resolve("::1") == "::1"


def test_a_name_service_that_hangs_holds_nobody_up():
    may_answer = threading.Event()
    asked: list[str] = []

    def look_up(host: str) -> str:
        asked.append(host)
        may_answer.wait()
        return "10.0.0.1"

    resolver = BackgroundResolver(look_up)
    assert [resolver.resolve("n1") for _ in range(3)] == [None] * 3
    may_answer.set()
    looked_up("n1")
    assert asked == ["n1"]
    assert resolver.resolve("n1") == "10.0.0.1"
    looked_up("n1")


def test_a_name_for_which_no_thread_can_be_started_is_looked_up_at_the_next_call():
    resolver = BackgroundResolver(lambda host: "10.0.0.1")
    with no_new_threads():
        assert resolver.resolve("n1") is None
    looked_up("n1")
    assert resolver.resolve("n1") is None
    looked_up("n1")
    assert resolver.resolve("n1") == "10.0.0.1"
    looked_up("n1")


def test_a_node_that_moved_is_found_and_a_failed_look_up_forgets_nothing():
    answers: list[str | OSError] = ["10.0.0.1", OSError("no such name"), "10.0.0.2"]

    def look_up(host: str) -> str:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    resolver = BackgroundResolver(look_up)
    heard = []
    for _ in range(3):
        heard.append(resolver.resolve("n1"))
        looked_up("n1")
    answers.append("10.0.0.2")
    heard.append(resolver.resolve("n1"))
    looked_up("n1")
    assert heard == [None, "10.0.0.1", "10.0.0.1", "10.0.0.2"]


def test_pysyncobj_asks_it_at_every_connect(monkeypatch):
    monkeypatch.setattr(pysyncobj.dns_resolver, "_g_resolver", None)
    install()
    resolver = pysyncobj.dns_resolver.globalDnsResolver()
    assert isinstance(resolver, BackgroundResolver)
    resolver._known["n1.invalid"] = "10.0.0.9"
    assert TCPNode("n1.invalid:9880").ip == "10.0.0.9"
    looked_up("n1.invalid")
    install()
    assert pysyncobj.dns_resolver.globalDnsResolver() is resolver
