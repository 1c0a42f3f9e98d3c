"""How messages to people count things: `1 message`, `2 messages`, `brokers 1, 3`."""

from collections.abc import Iterable


def counted(count: int, noun: str) -> str:
    """A number and the noun behind it, which may have words before its last one: `0 timed
    messages`, `1 history`, `2 histories`."""
    return f"{count} {noun if count == 1 else _plural(noun)}"


def named(noun: str, names: Iterable[object]) -> str:
    """The noun and the names behind it, at least one."""
    texts = [*map(str, names)]
    return f"{noun if len(texts) == 1 else _plural(noun)} {', '.join(texts)}"


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2] not in "aeo":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
