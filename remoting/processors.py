"""Which handler answers which request code.

A handler takes a request and its connection and returns the response, or a coroutine of it, or
None if it answers later or not at all. A raw handler gets the undecoded frame and does everything
itself: it is for the few codes on the hot path, which must pay for no task, future or command.
"""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from protocol.codes import ResponseCode
from remoting.command import RemotingCommand

if TYPE_CHECKING:
    from remoting.connection import Connection

Response: TypeAlias = RemotingCommand | None
Handler: TypeAlias = "Callable[[RemotingCommand, Connection], Response | Awaitable[Response]]"
# (connection, header type, header, body)
RawHandler: TypeAlias = "Callable[[Connection, int, bytes, bytes], None]"


class Processors:
    """A table of handlers; codes without one get the default, which answers 3."""

    def __init__(self) -> None:
        self.handlers: dict[int, Handler] = {}
        self.raw_handlers: dict[int, RawHandler] = {}
        self.default_handler: Handler = answer_not_supported

    def register(self, code: int, handler: Handler) -> None:
        """Sets the handler of a code. Two for one code are a bug."""
        self._assert_free(code)
        self.handlers[int(code)] = handler

    def register_raw(self, code: int, handler: RawHandler) -> None:
        """Sets the hot-path handler of a code."""
        self._assert_free(code)
        self.raw_handlers[int(code)] = handler

    def default(self, handler: Handler) -> None:
        """Sets what answers all other codes."""
        self.default_handler = handler

    def _assert_free(self, code: int) -> None:
        assert code not in self.handlers, f"request code {code} has a handler already"
        assert code not in self.raw_handlers, f"request code {code} has a raw handler already"


def answer_not_supported(request: RemotingCommand, connection: "Connection") -> RemotingCommand:
    """REQUEST_CODE_NOT_SUPPORTED (3), in Java's words."""
    return RemotingCommand.response_to(
        request,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f" request type {request.code} not supported",
    )


__all__ = ["Handler", "Processors", "RawHandler", "Response", "answer_not_supported"]
