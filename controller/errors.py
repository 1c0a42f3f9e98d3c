"""Errors of the controller's doors that the common ones do not cover."""

from protocol.codes import ResponseCode
from protocol.errors import BatonError

__all__ = ["CommandTooLargeError", "OutcomeUnknownError"]


class CommandTooLargeError(BatonError):
    """What was asked makes a command too large for the log."""

    response_code = ResponseCode.CONTROLLER_INVALID_REQUEST


class OutcomeUnknownError(BatonError):
    """The request may have been carried out, or may still be: ask again with the same request_id.

    On gRPC it is the status UNAVAILABLE and no reply; on remoting it is code 1.
    """

    response_code = ResponseCode.SYSTEM_ERROR
    retriable = True

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"outcome unknown: {self.reason}"
