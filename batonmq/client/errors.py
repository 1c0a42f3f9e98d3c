"""The errors that the client raises, grouped by what the program should do.

`NoNameServerError`, `NoMasterError`, `NoControllerLeaderError`: no server is available; try again
later, and see `mqctl health`. `NoRouteError`: the topic does not exist yet; create it.
`SendFailedError`: not acknowledged before the deadline; the message may or may not be stored.
`NoReplyError`: a request was sent, and no reply came in time. `MessageIllegalError`,
`UnsupportedByBrokerError`, `ArgumentError`: another try would fail the same way; change the call.
`ClientClosedError`: a call before `start()` or after `close()`. A server's refusal is
`protocol.errors.ResponseError`, with its code and remark.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batonmq.protocol.codes import request_name
from batonmq.protocol.errors import BatonError
from batonmq.runtime.words import counted

SHOWN = 4
"""How many of its last attempts the text of a failed send shows."""


class ClientError(BatonError):
    """The root of the errors below."""


class ClientClosedError(ClientError):
    """The object was used before `start()` or after `close()`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not running: call start() first, and nothing after close()")
        self.what = what


class ArgumentError(ClientError, ValueError):
    """An invalid argument; the text says what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} is {repr(value)[:120]}: {allowed}")
        self.name = name


class NoNameServerError(ClientError):
    """No name server was given, or none answers."""

    def __init__(self, asked: Sequence[tuple[str, str]]) -> None:
        """`asked`: (address, error) for each name server tried."""
        self.asked = tuple(asked)
        text = "no name server given: pass name_servers='host:9876' or set NAMESRV_ADDR"
        if asked:
            text = f"no name server answers ({_tried(asked)}): check that they run"
            if any("connection ended" in why for _, why in asked):
                text += ", and whether they take TLS only"
        super().__init__(text)


class NoReplyError(ClientError):
    """A request was sent and may still be consumed, but no reply came in time."""

    def __init__(self, topic: str, timeout_ms: int) -> None:
        super().__init__(
            f"no answer to a question in {topic} within {timeout_ms} ms:"
            " check that a consumer of the topic replies"
        )
        self.topic = topic
        self.timeout_ms = timeout_ms


class NoRouteError(ClientError):
    """The name servers reply, but have no route for the topic."""

    def __init__(self, topic: str, name_servers: Sequence[str], hint: str = "") -> None:
        self.topic = topic
        self.name_servers = tuple(name_servers)
        at = ", ".join(name_servers) or "any name server"
        advice = hint or f"create it with `mqctl updateTopic -t {topic} -c CLUSTER`"
        super().__init__(f"no route for topic {topic} at {at}: {advice}")


class NoMasterError(ClientError):
    """The broker group has no master that can be reached now."""

    def __init__(self, broker_name: str, detail: str = "") -> None:
        self.broker_name = broker_name
        super().__init__(
            f"broker group {broker_name} has no reachable master{detail and ' (' + detail + ')'}: "
            f"an election may be under way; see `mqctl getSyncStateSet -b {broker_name}`"
        )


class MessageIllegalError(ClientError):
    """The message is invalid."""


class UnsupportedByBrokerError(ClientError):
    """The server does not support this request code: it replied REQUEST_CODE_NOT_SUPPORTED (3)."""

    def __init__(self, what: str, request_code: int, address: str, advice: str = "") -> None:
        self.request_code = request_code
        self.address = address
        text = (
            f"{what}: {address} does not know {request_name(request_code)}: it is another kind of"
            " server, or of an earlier version"
        )
        super().__init__(f"{text}; {advice}" if advice else text)


@dataclass(frozen=True, slots=True)
class SendAttempt:
    """One try of one send. `code` is the reply's code, -1 if there was no reply.

    `broker_name` and `address` are "-" where none was known."""

    broker_name: str
    address: str
    elapsed_ms: int
    code: int
    remark: str

    def __str__(self) -> str:
        what = f"code {self.code} {self.remark}" if self.code >= 0 else self.remark
        if self.broker_name == "-":
            return what
        at = "" if self.address == "-" else f" at {self.address}"
        return f"{self.broker_name}{at}: {what}"


class SendFailedError(ClientError):
    """A send was refused, or not acknowledged before the deadline.

    After a deadline the message may be stored nevertheless (if its reply was lost), so another send
    may store it twice. `attempts`: the tries; `code`: the last reply's code, -1 without a reply."""

    def __init__(
        self, topic: str, attempts: Sequence[SendAttempt], elapsed_ms: int, *, advice: str = ""
    ) -> None:
        self.topic = topic
        self.attempts = tuple(attempts)
        self.elapsed_ms = elapsed_ms
        self.code = attempts[-1].code if attempts else -1
        # A failover takes many tries, most of which say the same.
        tries = "; ".join(dict.fromkeys(map(str, self.attempts[-SHOWN:])))
        text = (
            f"send to topic {topic} not acknowledged after"
            f" {counted(len(self.attempts), 'attempt')} in {elapsed_ms} ms"
        )
        if tries:
            text += f" (last: {tries})"
        super().__init__(f"{text}; {advice}" if advice else text)


class NoControllerLeaderError(ClientError):
    """No controller answered as leader before the deadline."""

    def __init__(self, asked: Sequence[tuple[str, str]]) -> None:
        self.asked = tuple(asked)
        super().__init__(
            f"no controller answers as leader ({_tried(asked)}): a majority of the controllers must"
            " run; see `mqctl getControllerMetaData`"
        )


def _tried(asked: Iterable[tuple[str, str]]) -> str:
    # An address may be asked several times, and the text of a failed connection begins with it.
    return "; ".join(f"{a}: {why.removeprefix(f'{a}: ')}" for a, why in dict.fromkeys(asked))
