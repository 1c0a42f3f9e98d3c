"""What a user of the client may meet, by what there is to do about it.

`NoRouteError`, `NoMasterError`: the cluster does not know, or nobody leads; create or wait.
`SendFailedError`: not acknowledged before the deadline; the message may or may not be stored.
`MessageIllegalError`, `UnsupportedByBrokerError`: asking again will not help.
`ClientClosedError`: the program used a client before `start()` or after `close()`.
Replies of a server that say no are `protocol.errors.ResponseError` with its code and remark.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.codes import ResponseCode
from protocol.errors import BatonError


class ClientError(BatonError):
    """Root of what this client raises itself."""

    response_code = ResponseCode.SYSTEM_ERROR
    retriable = False


class ClientClosedError(ClientError):
    """The object was used before `start()` or after `close()`."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} is not running: call start() first, and nothing after close()")
        self.what = what


class NoNameServerError(ClientError):
    """No name server was given, or none of those given answers."""

    retriable = True

    def __init__(self, asked: Sequence[tuple[str, str]]) -> None:
        """`asked`: (address, why it did not help) of each name server tried."""
        self.asked = tuple(asked)
        if asked:
            tried = "; ".join(f"{a}: {why.removeprefix(f'{a}: ')}" for a, why in asked)
            text = f"no name server answers ({tried}): check that they run"
        else:
            text = "no name server given: pass name_servers='host:9876' or set NAMESRV_ADDR"
        super().__init__(text)


class NoRouteError(ClientError):
    """The name servers answer, but do not know the topic."""

    response_code = ResponseCode.TOPIC_NOT_EXIST
    retriable = True

    def __init__(self, topic: str, name_servers: Sequence[str], hint: str = "") -> None:
        self.topic = topic
        self.name_servers = tuple(name_servers)
        at = ", ".join(name_servers) or "any name server"
        advice = hint or f"create it with `mqctl updateTopic -t {topic} -c CLUSTER`"
        super().__init__(f"no route for topic {topic} at {at}: {advice}")


class NoMasterError(ClientError):
    """The broker group is known but has no master at the moment."""

    response_code = ResponseCode.SERVICE_NOT_AVAILABLE
    retriable = True

    def __init__(self, broker_name: str, detail: str = "") -> None:
        self.broker_name = broker_name
        super().__init__(
            f"broker group {broker_name} has no reachable master{detail and ' (' + detail + ')'}: "
            f"an election may be under way; see `mqctl getSyncStateSet -b {broker_name}`"
        )


class MessageIllegalError(ClientError):
    """The message can never be accepted as it is."""

    response_code = ResponseCode.MESSAGE_ILLEGAL


class UnsupportedByBrokerError(ClientError):
    """The server answered 3: it does not serve this request code."""

    response_code = ResponseCode.REQUEST_CODE_NOT_SUPPORTED

    def __init__(self, what: str, request_code: int, address: str, advice: str = "") -> None:
        self.request_code = request_code
        self.address = address
        text = f"{what}: the server at {address} does not serve request code {request_code}"
        super().__init__(f"{text}; {advice}" if advice else text)


@dataclass(frozen=True, slots=True)
class SendAttempt:
    """One try of one send. `code` is the reply's code, -1 if there was no reply."""

    broker_name: str
    address: str
    elapsed_ms: int
    code: int
    remark: str


class SendFailedError(ClientError):
    """A send was not acknowledged: refused for good, or no acknowledgement before the deadline.

    After a deadline the message may nevertheless be stored (an answer can be lost on its way), so
    sending again may duplicate it. `attempts` tells what was tried, `code` the last reply's code
    (-1: no reply).
    """

    def __init__(
        self,
        topic: str,
        attempts: Sequence[SendAttempt],
        elapsed_ms: int,
        *,
        advice: str = "",
        keep: int = 3,
    ) -> None:
        self.topic = topic
        self.attempts = tuple(attempts)
        self.elapsed_ms = elapsed_ms
        self.code = attempts[-1].code if attempts else -1
        told = "; ".join(
            f"{a.broker_name} at {a.address}: "
            + (f"code {a.code} {a.remark}" if a.code >= 0 else a.remark)
            for a in self.attempts[-keep:]
        )
        text = (
            f"send to topic {topic} not acknowledged after {len(self.attempts)} attempts "
            f"in {elapsed_ms} ms"
        )
        if told:
            text += f" (last: {told})"
        super().__init__(f"{text}; {advice}" if advice else text)
