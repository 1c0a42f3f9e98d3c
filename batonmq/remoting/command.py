"""Requests and responses, and their frames. Pure. A command has code, string fields, remark and
body; `opaque` pairs a response with its request.

A frame is `i32 length`, `u8 header type`, `u24 header length`, header, body. A JSON header has
sorted keys, absent rather than null. A binary one ("ROCKETMQ") is code i16, language u8, version
i16, opaque i32, flag i32, remark (i32 + utf8), fields (i32 size, then key i16 + bytes, value i32 +
bytes). Its code is cut to 16 bits; `decode_frame` restores POP codes. Origin: Java
`RemotingCommand`, `NettyDecoder`, `RemotingSerializable`, `RocketMQSerializable`.
"""

import re
import struct
from collections.abc import Generator, Mapping
from typing import Final, Self

import msgspec

from batonmq.protocol.codes import MQ_VERSION, LanguageCode, RequestCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal, RemoteProtocolError
from batonmq.protocol.fastjson import NOT_JSON
from batonmq.protocol.numbers import whole_number

FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2
TYPE_JSON: Final = 0
TYPE_BINARY: Final = 1

# Including the length field, as in Java.
FRAME_SIZE_MAX: Final = 16_777_216
HEADER_SIZE_MAX: Final = 160 * 1024
"""The largest header of a request (R58). Its largest field, properties, has at most 32 KiB, or four
times as much in JSON escapes. A header is decoded in one step, at up to 0.1 µs per byte."""
FIELDS_MAX: Final = 1024  # in the header of a request; clients send some twenty
SHORT_HEADER: Final = 8192  # bytes of a header that costs little, whatever is in it
BUFFER_SIZE: Final = 65_536
_FRAME: Final = struct.Struct(">II")
_unpack: Final = _FRAME.unpack_from
_I32: Final = struct.Struct(">i")


class RemotingCommand(msgspec.Struct, eq=False):
    """`ext`: the fields of this code. `has_ext` False: there was no map of fields, and none is
    encoded."""

    code: int
    flag: int = 0
    opaque: int = 0
    language: LanguageCode = LanguageCode.PYTHON
    version: int = MQ_VERSION
    remark: str | None = None
    ext: dict[str, str] = {}
    body: bytes = b""
    serialize_type: int = TYPE_JSON
    has_ext: bool = True

    @property
    def size(self) -> int:
        """Bytes of body and fields, for limits on kept requests."""
        return len(self.body) + sum(map(len, self.ext)) + sum(map(len, self.ext.values()))

    @classmethod
    def request(
        cls, code: int, ext: Mapping[str, str | int | bool | None] | None = None, body: bytes = b""
    ) -> Self:
        """Field values may be numbers and booleans; None leaves a field out."""
        return cls(code, ext=text_fields(ext), body=body)

    @classmethod
    def response_to(
        cls,
        request: "RemotingCommand",
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
        ext: Mapping[str, str | int | bool | None] | None = None,
        body: bytes = b"",
    ) -> Self:
        """The response to `request`, with a JSON header, as from a Java server."""
        return cls(
            code,
            flag=FLAG_RESPONSE,
            opaque=request.opaque,
            remark=remark,
            ext=text_fields(ext),
            body=body,
        )

    @classmethod
    def refusal_of(cls, request: "RemotingCommand", code: int, remark: str) -> Self:
        """The refusal of `request`, without a map of fields, as from a Java server."""
        # With an empty map a stock client looks for the mandatory fields of some replies also in a
        # refusal: instead of POLLING_TIMEOUT it would see an exception.
        refusal = cls.response_to(request, code, remark)
        refusal.has_ext = False
        return refusal

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)

    def require(self, name: str) -> str:
        """A mandatory field. Raises BrokerRefusal(SYSTEM_ERROR) that names it, as Java does."""
        value = self.ext.get(name)
        if value is None:
            raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, f"the custom field <{name}> is null")
        return value

    def require_int(self, name: str) -> int:
        """A mandatory whole number. Raises BrokerRefusal(SYSTEM_ERROR) that names the field."""
        return _to_int(name, self.require(name))

    def get_int(self, name: str, default: int) -> int:
        """A whole number; `default` if absent. Raises as `require_int`."""
        value = self.ext.get(name)
        return default if value is None or value == "" else _to_int(name, value)

    def get_bool(self, name: str) -> bool:
        """As Java parses it: "true" in any case is true, everything else false."""
        return self.ext.get(name, "").lower() == "true"

    def __repr__(self) -> str:
        kind = "response" if self.is_response else "oneway" if self.is_oneway else "request"
        remark = f" remark={self.remark!r}" if self.remark else ""
        return (
            f"<{kind} code={self.code} opaque={self.opaque} ext={self.ext}"
            f"{remark} body={len(self.body)} B>"
        )


def text_fields(ext: Mapping[str, str | int | bool | None] | None) -> dict[str, str]:
    """Field values as text: booleans as `true`/`false`, numbers decimal; None is left out."""
    if not ext:
        return {}
    return {name: _to_text(value) for name, value in ext.items() if value is not None}


def _to_text(value: str | int | bool) -> str:
    if value is True:
        return "true"
    if value is False:
        return "false"
    # An IntEnum prints its number only as int.
    return value if isinstance(value, str) else str(int(value))


def _to_int(name: str, text: str) -> int:
    number = whole_number(text)
    if number is None:
        raise BrokerRefusal(
            ResponseCode.SYSTEM_ERROR,
            f"the custom field <{name}> is no whole number: {text[:64]!r}",
        )
    return number


def receive_buffer() -> memoryview:
    """Makes the buffer that the readers of all connections of a loop share."""
    return memoryview(bytearray(BUFFER_SIZE))


class FrameReader:
    """Splits a stream into frames: read into `get_buffer()`, then exhaust `received(n)`. All
    connections of a loop read into one buffer; between reads a connection keeps only the beginning
    of an incomplete frame. Header and body are copies. `get_buffer()` is never empty, except after
    `put_by`. A frame larger than the shared buffer gets its own, which grows with the arrived
    bytes: anyone can announce 16 MiB (R58)."""

    __slots__ = ("_kept", "_large", "_large_end", "_large_size", "_shared")

    def __init__(self, shared: memoryview) -> None:
        """`shared`: from `receive_buffer`; unused by others between `get_buffer` and `received`."""
        self._shared = shared
        self._kept = b""
        self._large: memoryview | None = None
        self._large_end = self._large_size = 0

    @property
    def waiting(self) -> int:
        """Bytes of an incomplete frame."""
        return len(self._kept) if self._large is None else self._large_end

    @property
    def held(self) -> int:
        """The memory that the incomplete frame takes."""
        return len(self._kept) if self._large is None else len(self._large)

    def put_by(self, n: int) -> None:
        """Keeps `n` more bytes for later: call `get_buffer` and `received(0)` before the next
        read."""
        if self._large is None:
            # `get_buffer` has put what was kept before at the begin.
            self._kept = self._shared[: len(self._kept) + n].tobytes()
        else:
            self._large_end += n

    def get_buffer(self) -> memoryview:
        """The buffer for the next bytes."""
        if self._large is not None:
            if self._large_end == len(self._large):
                self._grow(self._large)
            return self._large[self._large_end :]
        kept = self._kept
        if kept:
            self._shared[: len(kept)] = kept
            return self._shared[len(kept) :]
        return self._shared

    def received(self, n: int) -> Generator[tuple[int, bytes, bytes], None, None]:
        """Yields (header type, header, body) of each frame that is complete after `n` more bytes.
        If the caller stops early, `get_buffer()` and `received(0)` continue. Raises
        RemoteProtocolError at a malformed frame; then the connection is unusable."""
        large = self._large
        view = self._shared if large is None else large
        end = self.waiting + n
        start = 0
        needed = 8
        try:
            while end - start >= 8:
                length, mark = _unpack(view, start)
                header_len = mark & 0xFFFFFF
                needed = length + 4
                if (
                    needed > FRAME_SIZE_MAX
                    or header_len + 4 > length
                    or mark >> 25
                    or not header_len
                ):
                    first = bytes(view[start : min(end, start + 16)])
                    raise RemoteProtocolError(_complaint(length, mark, first))
                if end - start < needed:
                    break
                body_at = start + 8 + header_len
                stop = start + needed
                start, needed = stop, 8
                yield (
                    mark >> 24,
                    view[body_at - header_len : body_at].tobytes(),
                    view[body_at:stop].tobytes(),
                )
        finally:
            # Also when the caller stops early. The large frame is incomplete: its buffer stays.
            if large is not None and start == 0:
                self._large_end = end
            else:
                self._large = None
                if start == end:
                    self._kept = b""
                else:
                    self._keep(view[start:end], needed)

    def _keep(self, rest: memoryview, needed: int) -> None:
        """Keeps the beginning of a frame of `needed` bytes."""
        # A large frame gets its own buffer only once enough has arrived: anyone can announce one.
        if needed <= BUFFER_SIZE or len(rest) < BUFFER_SIZE // 2:
            self._kept = rest.tobytes()
            return
        self._large, self._large_end, self._kept = rest, len(rest), b""
        self._large_size = needed
        self._grow(rest)

    def _grow(self, large: memoryview) -> None:
        """Doubles the buffer at most, up to the frame's size."""
        grown = memoryview(bytearray(min(self._large_size, 2 * len(large))))
        grown[: len(large)] = large
        self._large = grown


def _complaint(length: int, mark: int, first: bytes) -> str:
    # 22 is the type of a TLS handshake record.
    if first[0] == 0x16:
        return "a TLS handshake, but this port speaks plaintext"
    if length + 4 > FRAME_SIZE_MAX:
        what = f"frame of {length + 4} bytes is over the limit of {FRAME_SIZE_MAX}"
    elif mark >> 25:
        what = f"header type {mark >> 24} is neither JSON (0) nor binary (1)"
    elif not mark & 0xFFFFFF:
        what = "frame without a header"
    else:
        what = f"header of {mark & 0xFFFFFF} bytes does not fit into a frame of {length}"
    return f"{what}; it begins with {first!r}"


_UNSET: Final = msgspec.UNSET


class _JsonOut(msgspec.Struct, gc=False):
    code: int
    extFields: dict[str, str] | msgspec.UnsetType
    flag: int
    language: str
    opaque: int
    remark: str | msgspec.UnsetType
    serializeTypeCurrentRPC: str
    version: int


class _JsonIn(msgspec.Struct, gc=False):
    code: int
    extFields: dict[str, str] | None = None
    flag: int = 0
    language: str | int | None = None
    opaque: int = 0
    remark: str | None = None
    version: int = 0


class _JsonLoose(_JsonIn, gc=False):
    """For peers in other languages, which send numbers and booleans as field values."""

    extFields: dict[str, str | int | float | bool | None] | None = None  # type: ignore[assignment]


_encode_json: Final = msgspec.json.Encoder().encode
_decode_json: Final = msgspec.json.Decoder(_JsonIn).decode
_decode_loose: Final = msgspec.json.Decoder(_JsonLoose).decode
_TYPE_NAMES: Final = ("JSON", "ROCKETMQ")
_LANGUAGES: Final = {language.name: language for language in LanguageCode}
# Codes above 16 bits, as cut in a binary header -> the code.
_ALIASES: Final = {int(code) & 0xFFFF: int(code) for code in RequestCode if code > 0xFFFF}
_BINARY_HEAD: Final = struct.Struct(">HBhiii")
_FLAG_AT: Final = 9
# `{"code":310,`: a header begins with its code of up to three digits; peers send few different
# ones.
_CODE_PREFIX: Final = 12
_CODES_MAX: Final = 1024
_OPAQUE: Final = re.compile(rb'"opaque":(-?\d{1,10})\b')
_STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TAIL_SIZE: Final = 512
_codes: Final[dict[bytes, int]] = {}


def encode_frame(cmd: RemotingCommand) -> bytes:
    """A whole frame, with a header of the command's `serialize_type`. Raises RemoteProtocolError if
    it is too large for any peer."""
    header = encode_header(cmd)
    body = cmd.body
    length = 4 + len(header) + len(body)
    if length + 4 > FRAME_SIZE_MAX:
        raise RemoteProtocolError(f"frame of {length + 4} bytes is over the limit")
    return b"".join((_FRAME.pack(length, cmd.serialize_type << 24 | len(header)), header, body))


def encode_header(cmd: RemotingCommand) -> bytes:
    """The header alone."""
    if cmd.serialize_type == TYPE_BINARY:
        return _encode_binary(cmd)
    return _encode_json(
        _JsonOut(
            cmd.code,
            cmd.ext if cmd.has_ext else _UNSET,
            cmd.flag,
            cmd.language.name,
            cmd.opaque,
            _UNSET if cmd.remark is None else cmd.remark,
            _TYPE_NAMES[TYPE_JSON],
            cmd.version,
        )
    )


def decode_frame(header: bytes, body: bytes, serialize_type: int) -> RemotingCommand:
    """The command of a frame. Raises RemoteProtocolError."""
    if serialize_type == TYPE_JSON:
        return _decode_json_header(header, body)
    if serialize_type == TYPE_BINARY:
        return _decode_binary(header, body)
    raise RemoteProtocolError(f"header type {serialize_type} is neither JSON (0) nor binary (1)")


def peek_code(serialize_type: int, header: bytes) -> int:
    """The code of a frame, without decoding the rest. Raises RemoteProtocolError for an invalid
    header; other errors appear on decoding."""
    if serialize_type == TYPE_BINARY:
        if len(header) < _BINARY_HEAD.size:
            raise RemoteProtocolError(f"binary header of {len(header)} bytes is cut off")
        code = header[0] << 8 | header[1]
        return _ALIASES.get(code, code)
    known = _codes.get(header[:_CODE_PREFIX])
    if known is None:
        known = _leading_code(header)
    return decode_frame(header, b"", TYPE_JSON).code if known is None else known


def _leading_code(header: bytes) -> int | None:
    """The code if a JSON header begins with it, as nearly all do."""
    if header[:8] != b'{"code":':
        return None
    end = header.find(b",", 8, 24)
    if end < 0 or not header[8:end].isdigit():
        return None
    code = int(header[8:end])
    # Bounded, because a stranger could send a new code in each frame (R58).
    if end < _CODE_PREFIX and len(_codes) < _CODES_MAX:
        _codes[header[:_CODE_PREFIX]] = code
    return code


def header_problem(serialize_type: int, header: bytes) -> str:
    """Why a request is refused undecoded (R58), or "". Fields of a binary one: `_binary_fields`."""
    if len(header) > HEADER_SIZE_MAX:
        return f"the header has {len(header)} bytes, allowed are {HEADER_SIZE_MAX}"
    # A property may have any number of colons, so the second look leaves out what is in quotes.
    if (
        serialize_type == TYPE_JSON
        and header.count(b":") > FIELDS_MAX
        and (fields := _STRING.sub(b"", header).count(b":")) > FIELDS_MAX
    ):
        return f"the header has {fields} fields, allowed are {FIELDS_MAX}"
    return ""


def peek_head(serialize_type: int, header: bytes) -> RemotingCommand:
    """Code and opaque of a request, without decoding its fields: it may be too large for that.
    Raises RemoteProtocolError if they are not in the usual place."""
    if serialize_type == TYPE_BINARY:
        code = peek_code(serialize_type, header)
        opaque = _BINARY_HEAD.unpack_from(header)[3]
    else:
        found = _OPAQUE.search(header, len(header) - _TAIL_SIZE) or _OPAQUE.search(
            header, 0, _TAIL_SIZE
        )
        leading = _leading_code(header)
        if leading is None or found is None:
            raise RemoteProtocolError(f"header of {len(header)} bytes without code and opaque")
        code, opaque = leading, int(found[1])
    cmd = RemotingCommand(code)
    cmd.opaque, cmd.serialize_type = opaque, serialize_type
    return cmd


def peek_is_response(serialize_type: int, header: bytes) -> bool:
    """Whether a frame is a response. JSON strings escape quotes, so these bytes can only be the
    key."""
    if serialize_type == TYPE_BINARY:
        return bool(header[_FLAG_AT + 3] & 1)
    # Search from the end: the key comes after a long property string.
    if header.rfind(b'"flag":0') >= 0:
        return False
    return decode_frame(header, b"", serialize_type).is_response


def _decode_json_header(header: bytes, body: bytes) -> RemotingCommand:
    try:
        try:
            fields: _JsonIn = _decode_json(header)
        # Only after a failure, since the loose decoder is slower and almost all peers send text
        # values.
        except msgspec.ValidationError:
            fields = _tighten(_decode_loose(header))
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"JSON header is not UTF-8: {error.reason}") from error
    except NOT_JSON as error:
        raise RemoteProtocolError(f"JSON header {header[:64]!r}: {error}") from error
    language = fields.language
    ext = fields.extFields
    return RemotingCommand(
        fields.code,
        flag=fields.flag,
        opaque=fields.opaque,
        language=(
            _LANGUAGES.get(language, LanguageCode.OTHER)
            if isinstance(language, str)
            else LanguageCode.OTHER
        ),
        version=fields.version,
        remark=fields.remark,
        ext={} if ext is None else ext,
        has_ext=ext is not None,
        body=body,
    )


def _tighten(loose: _JsonLoose) -> _JsonIn:
    ext: dict[str, str] | None = None
    if loose.extFields is not None:
        ext = {}
        for name, value in loose.extFields.items():
            if isinstance(value, bool):
                ext[name] = "true" if value else "false"
            elif value is not None:
                ext[name] = str(value)
    return _JsonIn(
        loose.code, ext, loose.flag, loose.language, loose.opaque, loose.remark, loose.version
    )


def _encode_binary(cmd: RemotingCommand) -> bytes:
    fields: list[bytes] = []
    for name, value in cmd.ext.items():
        key = name.encode()
        data = value.encode()
        fields.append(b"%b%b%b%b" % (len(key).to_bytes(2), key, len(data).to_bytes(4), data))
    ext = b"".join(fields)
    remark = (cmd.remark or "").encode()
    return b"".join(
        (
            _BINARY_HEAD.pack(
                cmd.code & 0xFFFF, cmd.language, cmd.version, cmd.opaque, cmd.flag, len(remark)
            ),
            remark,
            _I32.pack(len(ext)),
            ext,
        )
    )


def _decode_binary(header: bytes, body: bytes) -> RemotingCommand:
    try:
        code, language, version, opaque, flag, remark_len = _BINARY_HEAD.unpack_from(header, 0)
        at = _BINARY_HEAD.size
        if remark_len < 0 or at + remark_len + 4 > len(header):
            raise RemoteProtocolError(
                f"binary header: a remark of {remark_len} bytes does not fit into {len(header)}"
            )
        remark = header[at : at + remark_len].decode() if remark_len else None
        at += remark_len
        ext = _binary_fields(header, at)
    except struct.error as error:
        raise RemoteProtocolError(f"binary header of {len(header)} bytes is cut off") from error
    except UnicodeDecodeError as error:
        raise RemoteProtocolError(f"binary header is not UTF-8: {error.reason}") from error
    return RemotingCommand(
        # Not for responses: only codes of requests exceed 16 bits.
        _ALIASES.get(code, code) if not flag & 1 else code,
        flag=flag,
        opaque=opaque,
        language=LanguageCode(language) if language <= 13 else LanguageCode.OTHER,
        version=version,
        remark=remark,
        ext=ext,
        has_ext=bool(ext),
        body=body,
        serialize_type=TYPE_BINARY,
    )


def _binary_fields(header: bytes, at: int) -> dict[str, str]:
    """The field map of a binary header whose i32 size is at `at`. Empty values count as absent.
    Raises RemoteProtocolError for lengths that do not fit, UnicodeDecodeError."""
    (size,) = _I32.unpack_from(header, at)
    at += 4
    end = at + size
    if size < 0 or end > len(header):
        raise RemoteProtocolError(
            f"binary header: fields of {size} bytes do not fit into {len(header)}"
        )
    ext: dict[str, str] = {}
    while at < end:
        value_len_at = at + 2 + (header[at] << 8 | header[at + 1]) if at + 2 <= end else end
        value_at = value_len_at + 4
        if value_at > end:
            raise RemoteProtocolError(f"binary header: the field at byte {at} is cut off")
        next_at = value_at + int.from_bytes(header[value_len_at:value_at])
        if next_at > end:
            raise RemoteProtocolError(f"binary header: the field at byte {at} is cut off")
        if len(ext) == FIELDS_MAX:
            raise RemoteProtocolError(f"binary header: more than {FIELDS_MAX} fields")
        if next_at > value_at and value_len_at > at + 2:
            ext[header[at + 2 : value_len_at].decode()] = header[value_at:next_at].decode()
        at = next_at
    return ext
