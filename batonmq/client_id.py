"""Who this client is: its id towards brokers and the address bytes in its message ids."""

import itertools
import os
import socket

from batonmq.clock import wall_ms

_serial = itertools.count(1)


def local_ip() -> str:
    """The address of the interface that outgoing traffic uses, 127.0.0.1 without a network.

    Connecting a datagram socket only chooses a route; nothing is sent.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def new_client_id(ip: str, instance_name: str | None = None) -> str:
    """`ip@name`. Without a name it is unique per client object, as in Java's `ip@pid#nanos`."""
    return f"{ip}@{instance_name or f'{os.getpid()}#{wall_ms()}{next(_serial)}'}"
