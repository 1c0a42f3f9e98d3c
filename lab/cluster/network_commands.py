"""The shell commands that build a network of namespaces, and the rules that cut it. Pure.

A star: one namespace is the router, every host hangs on it by a veth pair and a subnet of its own
(10.77.N.0/30). All traffic between hosts is forwarded there, so one table of rules, replaced in one
step, cuts any pair in any direction. A dropped packet has no reply: neither end sees RST or FIN.
"""

from collections.abc import Iterable, Sequence
from typing import Final

PREFIX: Final = "bmqf"
ROUTER: Final = "router"
SUBNET: Final = "10.77"
CHAIN: Final = "CUT"

Pair = tuple[str, str]
"""(source address, destination address): packets from the one to the other."""


def namespace(network: str, name: str) -> str:
    """The namespace of a host. `network` begins with the pid of the process that made it."""
    return f"{PREFIX}-{network}-{name}"


def owner_of(namespace_name: str) -> int | None:
    """Which process made this namespace; None if no laboratory did."""
    prefix, _, rest = namespace_name.partition("-")
    owner, _, name = rest.partition("-")
    return int(owner) if prefix == PREFIX and owner.isdigit() and name else None


def host_address(index: int) -> str:
    """The address of host number `index` (0 and up, at most 254 hosts)."""
    return f"{SUBNET}.{index + 1}.2"


def _gateway(index: int) -> str:
    return f"{SUBNET}.{index + 1}.1"


def router_port(index: int) -> str:
    """The router's end of the link to a host."""
    return f"v{index}"


def build(network: str, hosts: Sequence[str]) -> list[list[str]]:
    """All commands that make the network, in order."""
    router = namespace(network, ROUTER)
    done = [
        ["ip", "netns", "add", router],
        ["ip", "-n", router, "link", "set", "lo", "up"],
        ["ip", "netns", "exec", router, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1"],
    ]
    for index, host in enumerate(hosts):
        done += _host(router, namespace(network, host), index)
    return done


def _host(router: str, name: str, index: int) -> list[list[str]]:
    port = router_port(index)
    return [
        ["ip", "netns", "add", name],
        ["ip", "-n", name, "link", "set", "lo", "up"],
        [
            "ip", "link", "add", port, "netns", router,
            "type", "veth", "peer", "name", "eth0", "netns", name,
        ],
        ["ip", "-n", router, "addr", "add", f"{_gateway(index)}/30", "dev", port],
        ["ip", "-n", router, "link", "set", port, "up"],
        ["ip", "-n", name, "addr", "add", f"{host_address(index)}/30", "dev", "eth0"],
        ["ip", "-n", name, "link", "set", "eth0", "up"],
        ["ip", "-n", name, "route", "add", "default", "via", _gateway(index)],
    ]  # fmt: skip


def removal(namespaces: Iterable[str]) -> list[list[str]]:
    """Removes namespaces; their links go with them."""
    return [["ip", "netns", "delete", name] for name in namespaces]


def rules(cut: Iterable[Pair]) -> str:
    """Input of `iptables-restore --noflush` in the router: exactly these pairs are cut."""
    drops = [f"-A {CHAIN} -s {source} -d {target} -j DROP" for source, target in sorted(set(cut))]
    return "\n".join(["*filter", f":{CHAIN} - [0:0]", *drops, "COMMIT", ""])


def first_rules() -> str:
    """As `rules` for an empty set, once, before any other."""
    return "\n".join(["*filter", f":{CHAIN} - [0:0]", f"-A FORWARD -j {CHAIN}", "COMMIT", ""])


def slowed(port: str, kbit: int, latency_ms: int) -> list[str]:
    """Lets a link carry no more than `kbit` a second; what waits longer than that is dropped."""
    return [
        "tc", "qdisc", "replace", "dev", port, "root", "tbf",
        "rate", f"{kbit}kbit", "burst", "4kb", "latency", f"{latency_ms}ms",
    ]  # fmt: skip


def unslowed(port: str) -> list[str]:
    return ["tc", "qdisc", "delete", "dev", port, "root"]


def between(
    ones: Iterable[str], others: Iterable[str], *, outward: bool = True, inward: bool = True
) -> set[Pair]:
    """What `ones` send to `others` (`outward`), and what they receive from them (`inward`)."""
    sent = one_way(ones, others) if outward else set()
    return sent | (one_way(others, ones) if inward else set())


def one_way(sources: Iterable[str], targets: Iterable[str]) -> set[Pair]:
    """Packets from any of `sources` to any of `targets`."""
    targets = list(targets)
    return {(source, target) for source in sources for target in targets if source != target}
