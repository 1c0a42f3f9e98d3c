"""Names of the other nodes, looked up beside the Raft thread and never in its way.

pysyncobj asks for an address at each attempt to connect, in the thread that also sends heartbeats:
a name server that does not answer would cost a leader its lead. And it keeps an address for ten
minutes, a failure for half a minute: a container that comes back with another address would not
be found. Here an answer is what the last look-up said, and each question starts the next one.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
from collections.abc import Callable

import pysyncobj.dns_resolver

__all__ = ["BackgroundResolver", "install"]

log = logging.getLogger(__name__)


def look_up(host: str) -> str:
    """An address of `host`, an IPv4 one if it has any. Raises OSError."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    first = next((entry for entry in found if entry[0] == socket.AF_INET), found[0])
    return str(first[4][0])


class BackgroundResolver:
    """In the place of pysyncobj's DnsCachingResolver; any thread may ask.

    At most one look-up per name is under way. A failed one keeps the address known before: the
    host may be there while the name service is not.
    """

    def __init__(self, look_up: Callable[[str], str] = look_up) -> None:
        self._look_up = look_up
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._under_way: dict[str, threading.Thread] = {}

    def setTimeouts(self, cache_s: float, fail_cache_s: float) -> None:
        """Nothing is cached for a time."""

    def setPreferredAddrFamily(self, family: object) -> None:
        """IPv4 is preferred, as pysyncobj's default is."""

    def resolve(self, host: str) -> str | None:
        """The address known so far, None for a name not yet looked up. Does not wait."""
        if _is_address(host):
            return host
        with self._lock:
            if host not in self._under_way:
                thread = threading.Thread(
                    target=self._refresh, args=(host,), name=f"resolve-{host}", daemon=True
                )
                self._under_way[host] = thread
                thread.start()
            return self._known.get(host)

    def wait(self, host: str) -> None:
        """Until the look-up of `host` that is under way has ended."""
        with self._lock:
            thread = self._under_way.get(host)
        if thread is not None:
            thread.join()

    def _refresh(self, host: str) -> None:
        try:
            address = self._look_up(host)
        except (OSError, UnicodeError) as error:
            log.debug("raft_name_unknown host=%s why=%s", host, error)
            address = ""
        with self._lock:
            before = self._known.get(host)
            if address and address != before:
                self._known[host] = address
                log.info("raft_name_resolved host=%s address=%s before=%s", host, address, before)
            del self._under_way[host]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def install() -> None:
    """Puts it in the place of pysyncobj's resolver. Idempotent, one for the whole process."""
    if not isinstance(pysyncobj.dns_resolver._g_resolver, BackgroundResolver):
        pysyncobj.dns_resolver._g_resolver = BackgroundResolver()
