"""Reads a request's extFields, and makes the two most frequent refusals. Each function that reads
raises BrokerRefusal(INVALID_PARAMETER) naming the field."""

from batonmq.protocol.codes import ResponseCode
from batonmq.protocol.errors import BrokerRefusal
from batonmq.protocol.message_id import decode_offset_msg_id
from batonmq.protocol.numbers import whole_number
from batonmq.remoting.command import RemotingCommand


def invalid(why: str) -> BrokerRefusal:
    return BrokerRefusal(ResponseCode.INVALID_PARAMETER, why)


def system_error(why: str) -> BrokerRefusal:
    """With the code that Java uses where no other one fits."""
    return BrokerRefusal(ResponseCode.SYSTEM_ERROR, why)


def text(request: RemotingCommand, key: str) -> str:
    """A mandatory field."""
    value = request.ext.get(key)
    if not value:
        raise invalid(f"request {request.code} lacks the field {key!r}")
    return value


def stored_at(message_id: str) -> int:
    """The physical offset in an offsetMsgId."""
    try:
        return decode_offset_msg_id(message_id)[1]
    except ValueError as error:
        raise invalid(f"msgId {message_id!r}: {error}") from error


def number(request: RemotingCommand, key: str, default: int | None = None) -> int:
    """A whole number; mandatory unless there is a default."""
    value = request.ext.get(key, "")
    if not value and default is not None:
        return default
    found = whole_number((value or text(request, key)).strip())
    if found is None:
        raise invalid(
            f"request {request.code}: field {key!r} is {value[:64]!r},"
            " a whole number of 64 bits is needed"
        )
    return found


def flag(request: RemotingCommand, key: str, default: bool = False) -> bool:
    """`true` or `false`, in any case."""
    value = request.ext.get(key)
    if not value:
        return default
    if value.lower() not in ("true", "false"):
        raise invalid(
            f"request {request.code}: field {key!r} is {value!r}, true or false is needed"
        )
    return value.lower() == "true"
