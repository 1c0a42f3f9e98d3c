"""Sends and pulls, decoded directly from the header's bytes, and the frames of their replies. Pure.

Sends (SEND_MESSAGE 10, SEND_MESSAGE_V2 310, SEND_BATCH_MESSAGE 320) and pulls (PULL_MESSAGE 11,
LITE_PULL_MESSAGE 361) come ten thousand times a second; a `RemotingCommand` would cost twice as
much. `decode_*` raises BrokerRefusal(SYSTEM_ERROR) that names a bad field, and RemoteProtocolError
for an invalid header.

A reply is `u32 length, u32 (type << 24 | header length), header, body`, made from templates, with a
JSON header as a Java server answers. Nothing in it needs JSON escaping: numbers, hex ids, checked
unique keys.
"""

import re
import struct
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec.json import encode as json_encode

from batonmq.protocol.codes import (
    MQ_VERSION,
    READ_REPLICA_FIELD,
    RELAY_FIELD,
    LanguageCode,
    RequestCode,
    ResponseCode,
)
from batonmq.protocol.errors import BatonError, BrokerRefusal, RemoteProtocolError
from batonmq.protocol.fastjson import NOT_JSON
from batonmq.remoting.command import TYPE_JSON, decode_frame, peek_code

I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]

_LENGTHS: Final = struct.Struct(">II")
_TAIL: Final = (
    b'"language":"PYTHON","opaque":%%d,"serializeTypeCurrentRPC":"JSON","version":%d}'
    % (MQ_VERSION)
)
_OK_PREFIX: Final = b'{"code":0,'
NO_FIELDS: Final[Mapping[str, str]] = {}
_PULL: Final = (
    b'{"code":%d,"extFields":{"maxOffset":"%d","minOffset":"%d","nextBeginOffset":"%d",'
    b'"suggestWhichBrokerId":"%d","groupSysFlag":"%d","topicSysFlag":"%d"},"flag":1,'
    b'"remark":"%s",' + _TAIL
)


class SendFields(msgspec.Struct, gc=False):
    """SendMessageRequestHeaderV2. `properties`: the raw property string."""

    producer_group: str = msgspec.field(name="a")
    topic: str = msgspec.field(name="b")
    default_topic: str = msgspec.field(name="c")
    default_topic_queue_nums: I32 = msgspec.field(name="d")
    queue_id: I32 = msgspec.field(name="e")
    sys_flag: I32 = msgspec.field(name="f")
    born_timestamp: I64 = msgspec.field(name="g")
    flag: I32 = msgspec.field(name="h")
    properties: str | None = msgspec.field(name="i", default=None)
    reconsume_times: I32 | None = msgspec.field(name="j", default=None)
    unit_mode: bool | None = msgspec.field(name="k", default=None)
    max_reconsume_times: I32 | None = msgspec.field(name="l", default=None)
    batch: bool | None = msgspec.field(name="m", default=None)
    broker_name: str | None = msgspec.field(name="n", default=None)
    relayed: str | None = msgspec.field(name=RELAY_FIELD, default=None)


class PullFields(msgspec.Struct, rename="camel", gc=False):
    """PullMessageRequestHeader. `sys_flag` bits: PULL_... in `protocol.sysflag`."""

    consumer_group: str
    topic: str
    queue_id: I32
    queue_offset: I64
    max_msg_nums: I32
    sys_flag: I32
    commit_offset: I64
    suspend_timeout_millis: I64
    sub_version: I64
    subscription: str | None = None
    expression_type: str | None = None
    max_msg_bytes: I32 | None = None
    request_source: I32 | None = None
    read_replica: bool | None = msgspec.field(name=READ_REPLICA_FIELD, default=None)


class SendFrame(msgspec.Struct, gc=False):
    """A send request's header; `ext.flag` is the message's flag, `flag` the frame's."""

    code: int
    opaque: int
    ext: SendFields = msgspec.field(name="extFields")
    flag: int = 0


class PullFrame(msgspec.Struct, gc=False):
    """A pull request's header. `language`: name or number of a LanguageCode."""

    code: int
    opaque: int
    ext: PullFields = msgspec.field(name="extFields")
    flag: int = 0
    language: str | int | None = None

    @property
    def is_ours(self) -> bool:
        """Whether it is from our own client, which finds a new master by itself."""
        return self.language in (LanguageCode.PYTHON.name, LanguageCode.PYTHON)


_ODD_NAMES: Final = {"broker_name": "bname", "relayed": RELAY_FIELD}
# SendMessageRequestHeader: the fields of `SendFields`, in its order, with long names.
_SendFieldsV1: Final[Any] = msgspec.defstruct(
    "SendMessageRequestHeader",
    [
        (each.name, each.type, msgspec.field(name=_ODD_NAMES.get(each.name), default=each.default))
        for each in msgspec.structs.fields(SendFields)
    ],
    rename="camel",
    gc=False,
)
_SendFrameV1: Final[Any] = msgspec.defstruct(
    "SendFrameV1",
    [("code", int), ("opaque", int), ("extFields", _SendFieldsV1), ("flag", int, 0)],
    gc=False,
)

F = TypeVar("F")
_decode_send = msgspec.json.Decoder(SendFrame, strict=False).decode
_decode_send_v1 = msgspec.json.Decoder(_SendFrameV1, strict=False).decode
_decode_pull = msgspec.json.Decoder(PullFrame, strict=False).decode
_LONG_NAMES: Final = dict(
    zip(SendFields.__struct_encode_fields__, _SendFieldsV1.__struct_encode_fields__, strict=True)
)
# A plain int: looking up a member of an enum takes longer than the rest of the comparison.
_LONG_NAMED: Final = int(RequestCode.SEND_MESSAGE)
_LONG_NAMED_START: Final = b'{"code":%d,' % _LONG_NAMED
_MISSING: Final = re.compile(r"missing required field `(\w+)`")
_AT: Final = re.compile(r"at `\$\.(?:extFields\.)?(\w+)`")


def decode_send(serialize_type: int, header: bytes) -> SendFrame:
    """The header of any send: SEND_MESSAGE (10) has long names, the others one-letter names."""
    if serialize_type != TYPE_JSON:
        code, opaque, flag, fields = _binary(serialize_type, header)
        return SendFrame(code, opaque, _send_fields(fields, code == _LONG_NAMED), flag)
    # Most sends have short names: they are decoded without a look at the code.
    if not header.startswith(_LONG_NAMED_START):
        try:
            return _decode_send(header)
        except NOT_JSON as error:
            if peek_code(serialize_type, header) != _LONG_NAMED:
                raise _refusal(error, header, _LONG_NAMES) from error
    try:
        frame = _decode_send_v1(header)
    except NOT_JSON as error:
        raise _refusal(error, header, {}) from error
    return SendFrame(frame.code, frame.opaque, _as_v2(frame.extFields), frame.flag)


def send_fields(code: int, ext: dict[str, str]) -> SendFields:
    """The same for a decoded request: REPLY_MESSAGE (324) has long names, its V2
    (325) short ones."""
    return _send_fields(ext, code == RequestCode.SEND_REPLY_MESSAGE)


def _send_fields(ext: dict[str, str], has_long_names: bool) -> SendFields:
    if has_long_names:
        return _as_v2(_convert(ext, _SendFieldsV1, {}))
    return _convert(ext, SendFields, _LONG_NAMES)


def decode_pull(serialize_type: int, header: bytes) -> PullFrame:
    """The header of a pull (11, 361)."""
    if serialize_type == TYPE_JSON:
        try:
            return _decode_pull(header)
        except NOT_JSON as error:
            raise _refusal(error, header, {}) from error
    cmd = decode_frame(header, b"", serialize_type)
    fields = _convert(cmd.ext, PullFields, {})
    return PullFrame(cmd.code, cmd.opaque, fields, cmd.flag, cmd.language)


def _as_v2(fields: Any) -> SendFields:
    # Copied by position, since both have the same fields in the same order.
    return SendFields(*msgspec.structs.astuple(fields))


def _binary(serialize_type: int, header: bytes) -> tuple[int, int, int, dict[str, str]]:
    cmd = decode_frame(header, b"", serialize_type)
    return cmd.code, cmd.opaque, cmd.flag, cmd.ext


def _convert(fields: dict[str, str], kind: type[F], names: dict[str, str]) -> F:
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise _refusal(error, b"", names) from error


def _refusal(error: Exception, header: bytes, names: dict[str, str]) -> Exception:
    """The error for an invalid header: BrokerRefusal names a bad field, RemoteProtocolError is for
    anything else."""
    if not isinstance(error, msgspec.ValidationError):
        return RemoteProtocolError(f"JSON header {header[:64]!r}: {error}")
    text = str(error)
    missing = _MISSING.search(text)
    if missing is not None:
        return _named(missing[1], names, "is null")
    at = _AT.search(text)
    return _named(
        at[1] if at else "extFields", names, f"is malformed: {text.partition(' - at')[0]}"
    )


def _named(field: str, names: dict[str, str], what: str) -> BrokerRefusal:
    long_name: Any = names.get(field, field)
    shown = field if long_name == field else f"{field} ({long_name})"
    return BrokerRefusal(ResponseCode.SYSTEM_ERROR, f"the custom field <{shown}> {what}")


def frame(header: bytes, body: bytes = b"") -> bytes:
    """One whole frame of a JSON header and a body."""
    size = len(header)
    return _LENGTHS.pack(4 + size + len(body), size) + header + body


class SendReplies:
    """Makes replies to sends from templates; the region is fixed per broker."""

    def __init__(self, region_id: str) -> None:
        # A percent sign in the region must not become a placeholder.
        region = json_encode(region_id).replace(b"%", b"%%")
        self._template = (
            b'{"code":0,"extFields":{"MSG_REGION":' + region + b',"TRACE_ON":"true",'
            b'"msgId":"%s","queueId":"%d","queueOffset":"%d","transactionId":"%s"},"flag":1,'
            + _TAIL
        )

    def ok(
        self,
        opaque: int,
        msg_id: bytes,
        queue_id: int,
        queue_offset: int,
        unique_key: bytes,
        recall_handle: bytes = b"",
    ) -> bytes:
        """The frame of SUCCESS (0). `unique_key`: without quotes, backslashes,
        control characters."""
        if recall_handle:
            # Inserted together with the key, so that one template serves all replies.
            unique_key += b'","recallHandle":"' + recall_handle
        header = self._template % (msg_id, queue_id, queue_offset, unique_key, opaque)
        size = len(header)
        return _LENGTHS.pack(4 + size, size) + header


def recode(reply: bytes, code: int, remark: str) -> bytes:
    """A reply with another code and a remark, for FLUSH_DISK_TIMEOUT (10) and FLUSH_SLAVE_TIMEOUT
    (12): stored, but not confirmed in time. Java clients read the same extFields."""
    header = reply[8:]
    assert header.startswith(_OK_PREFIX), "only a reply with code 0 waits for its confirmation"
    return frame(
        b'{"code":%d,"remark":%s,' % (code, json_encode(remark)) + header[len(_OK_PREFIX) :]
    )


def refusal(opaque: int, code: int, remark: str, fields: Mapping[str, str] = NO_FIELDS) -> bytes:
    """The reply to a refused request. It always has extFields, which clients dereference. `fields`:
    extra fields for our clients and members."""
    return frame(
        b'{"code":%d,"extFields":%s,"flag":1,"remark":%s,'
        % (code, json_encode(fields), json_encode(remark))
        + _TAIL % opaque
    )


def refusal_of(opaque: int, error: BatonError, fields: Mapping[str, str] = NO_FIELDS) -> bytes:
    """The refusal for `error`, with these fields."""
    if isinstance(error, BrokerRefusal):
        return refusal(opaque, error.code, error.remark, fields)
    return refusal(opaque, error.response_code, str(error), fields)


class PullFlags(NamedTuple):
    """The broker id to read from next, and the sysFlags of group and topic."""

    suggested_id: int = 0
    group_sys_flag: int = 0
    topic_sys_flag: int = 0


class PullOffsets(NamedTuple):
    """Offsets in a pull's reply: where to continue, and the visible range [min, max)."""

    next_begin: int
    minimum: int
    maximum: int


def pull_header(
    opaque: int, code: int, remark: str, offsets: PullOffsets, flags: PullFlags
) -> bytes:
    """The header of a pull's reply; `remark` is a status name of plain letters."""
    begin, minimum, maximum = offsets
    return _PULL % (code, maximum, minimum, begin, *flags, remark.encode("ascii"), opaque)


def pull_frame(header: bytes, size: int, parts: list[memoryview]) -> bytes:
    """One frame of a pull's header and the stored records, copied once."""
    return b"".join((_LENGTHS.pack(4 + len(header) + size, len(header)), header, *parts))
