"""All errors derive from BatonError, with one class for each reaction: `FencedError`: step back;
`NotLeaderError`: ask elsewhere; `CorruptLogError`: stop; `RemoteProtocolError`: drop the peer;
`ConfigError`: fix the file. `response_code`: with which a server answers the request that raised
it."""

from typing import ClassVar

from batonmq.protocol.codes import ResponseCode, code_name, request_name

DISK_FULL = "the disk is full"
"""The beginning of the remark with which a broker refuses writes while its disk is full."""


class BatonError(Exception):
    """Root of all errors that this project raises on purpose."""

    response_code: ClassVar[ResponseCode] = ResponseCode.SYSTEM_ERROR


class FencedError(BatonError):
    """The caller acts in a past epoch and must step back. `what`: the refused action; `given` and
    `current`: epochs."""

    response_code = ResponseCode.CONTROLLER_FENCED_MASTER_EPOCH

    def __init__(self, what: str, given: int, current: int) -> None:
        super().__init__(what, given, current)
        self.what = what
        self.given = given
        self.current = current

    def __str__(self) -> str:
        return f"{self.what}: epoch {self.given} is fenced by {self.current}"


class NotLeaderError(BatonError):
    """Another node leads. `leader`: its address, None if unknown."""

    response_code = ResponseCode.CONTROLLER_NOT_LEADER

    def __init__(self, leader: str | None = None) -> None:
        super().__init__(leader)
        self.leader = leader

    def __str__(self) -> str:
        return f"not the leader; the leader is {self.leader or 'not known'}"


class CorruptLogError(BatonError):
    """Bytes on disk differ from what was written (G8). `file` and `offset` (in the log) say
    where."""

    def __init__(self, file: str, offset: int, what: str) -> None:
        super().__init__(file, offset, what)
        self.file = file
        self.offset = offset
        self.what = what

    def __str__(self) -> str:
        return f"{self.file} at offset {self.offset}: {self.what}"


class RemoteProtocolError(BatonError):
    """The peer sent bytes that break the protocol: close the connection."""


class ConfigError(BatonError):
    """A setting that stops the start. `value` None: missing. `where`: `file:line` or the
    environment variable; `allowed`: what would be accepted."""

    def __init__(self, key: str, value: object, where: str, allowed: str) -> None:
        super().__init__(key, value, where, allowed)
        self.key = key
        self.value = value
        self.where = where
        self.allowed = allowed

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {self.value!r}"
        return f"{self.where}: {self.key}{value}: {self.allowed}"


class BrokerRefusal(BatonError):
    """In a processor: answer the request with this code and remark."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(code, remark)
        self.code = code
        self.remark = remark

    def __str__(self) -> str:
        return f"{code_name(self.code)} ({self.code}): {self.remark}"


class ResponseError(BatonError):
    """A reply other than success, raised at the requester."""

    def __init__(self, code: int, remark: str | None, address: str) -> None:
        super().__init__(code, remark, address)
        self.code = code
        self.remark = remark or ""
        self.address = address

    def __str__(self) -> str:
        return f"{self.address} answered {code_name(self.code)} ({self.code}): {self.remark}"


class RequestTimeoutError(BatonError):
    """No answer within `timeout_ms`; the request may have been carried out."""

    def __init__(self, address: str, timeout_ms: int, code: int) -> None:
        super().__init__(address, timeout_ms, code)
        self.address = address
        self.timeout_ms = timeout_ms
        self.code = code

    def __str__(self) -> str:
        what = request_name(self.code)
        return f"{self.address}: no answer to {what} within {self.timeout_ms} ms"


class ConnectError(BatonError):
    """No connection, or it ended before the answer. `sent` False: the request never reached the
    peer."""

    response_code = ResponseCode.SERVICE_NOT_AVAILABLE

    def __init__(self, address: str, reason: str, *, sent: bool = False) -> None:
        super().__init__(address, reason)
        self.address = address
        self.reason = reason
        self.sent = sent

    def __str__(self) -> str:
        return f"{self.address}: {self.reason}"
