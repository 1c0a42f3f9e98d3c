"""One request or response: a code, string fields, a remark and a body. Pure.

`opaque` pairs a response with its request; the connection that sends a request sets it. Origin:
Java `RemotingCommand`.
"""

from collections.abc import Mapping
from typing import Final, Self

import msgspec

from batonmq.protocol.codes import MQ_VERSION, LanguageCode, ResponseCode
from batonmq.protocol.errors import BrokerRefusal

FLAG_RESPONSE: Final = 1
FLAG_ONEWAY: Final = 2
TYPE_JSON: Final = 0
TYPE_BINARY: Final = 1


class RemotingCommand(msgspec.Struct, eq=False):
    """`ext` are the header fields of this code. `has_ext` False: the sender wrote no map of fields,
    not even an empty one, and none is written when the command is encoded."""

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

    @classmethod
    def request(
        cls, code: int, ext: Mapping[str, str | int | bool | None] | None = None, body: bytes = b""
    ) -> Self:
        """A request. Field values may be numbers and booleans; None leaves a field out."""
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
        """The answer to `request`. Always with a JSON header, as a Java server answers too."""
        return cls(
            code,
            flag=FLAG_RESPONSE,
            opaque=request.opaque,
            remark=remark,
            ext=text_fields(ext),
            body=body,
        )

    @property
    def is_response(self) -> bool:
        return bool(self.flag & FLAG_RESPONSE)

    @property
    def is_oneway(self) -> bool:
        return bool(self.flag & FLAG_ONEWAY)

    def require(self, name: str) -> str:
        """A mandatory field. Raises BrokerRefusal SYSTEM_ERROR that names it, as Java does."""
        value = self.ext.get(name)
        if value is None:
            raise BrokerRefusal(ResponseCode.SYSTEM_ERROR, f"the custom field <{name}> is null")
        return value

    def require_int(self, name: str) -> int:
        """A mandatory whole number. Raises BrokerRefusal SYSTEM_ERROR that names the field."""
        return _to_int(name, self.require(name))

    def get_int(self, name: str, default: int) -> int:
        """A whole number, `default` where the field is absent. Raises as `require_int`."""
        value = self.ext.get(name)
        return default if value is None or value == "" else _to_int(name, value)

    def get_bool(self, name: str, default: bool = False) -> bool:
        """A boolean as Java parses it: "true" in any case is true, everything else false."""
        value = self.ext.get(name)
        return default if value is None or value == "" else value.lower() == "true"

    def __repr__(self) -> str:
        kind = "response" if self.is_response else "oneway" if self.is_oneway else "request"
        remark = f" remark={self.remark!r}" if self.remark else ""
        return (
            f"<{kind} code={self.code} opaque={self.opaque} ext={self.ext}"
            f"{remark} body={len(self.body)} B>"
        )


def text_fields(ext: Mapping[str, str | int | bool | None] | None) -> dict[str, str]:
    """Field values as text: booleans `true`/`false`, numbers decimal, None left out."""
    if not ext:
        return {}
    return {name: _to_text(value) for name, value in ext.items() if value is not None}


def _to_text(value: str | int | bool) -> str:
    if value is True:
        return "true"
    if value is False:
        return "false"
    # An IntEnum prints as its number only through int.
    return value if isinstance(value, str) else str(int(value))


def _to_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise BrokerRefusal(
            ResponseCode.SYSTEM_ERROR, f"the custom field <{name}> is no whole number: {text!r}"
        ) from None
