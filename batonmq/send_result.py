"""What a send came back with."""

from dataclasses import dataclass
from enum import StrEnum

from protocol.codes import ResponseCode
from protocol.message import MessageQueue


class SendStatus(StrEnum):
    """`SEND_OK` is the only acknowledgement: on every member of the SyncStateSet (G1).

    The others mean that the master stored the message but that not everyone who must have it
    confirmed in time: it is probably kept, but a failover may lose it. Send again if it matters;
    a reader may then meet it twice.
    """

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


STATUS_BY_CODE: dict[int, SendStatus] = {
    ResponseCode.SUCCESS: SendStatus.SEND_OK,
    ResponseCode.FLUSH_DISK_TIMEOUT: SendStatus.FLUSH_DISK_TIMEOUT,
    ResponseCode.FLUSH_SLAVE_TIMEOUT: SendStatus.FLUSH_SLAVE_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE: SendStatus.SLAVE_NOT_AVAILABLE,
}


@dataclass(frozen=True, slots=True)
class SendResult:
    """`msg_id` is the client's unique key (a comma list for a batch), `offset_msg_id` names the
    broker address and the physical offset; `queue_offset` is that of the first message."""

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    attempts: int = 1
    address: str = ""

    @property
    def acknowledged(self) -> bool:
        """True only for SEND_OK. If false, the message was stored but not acknowledged by all."""
        return self.status is SendStatus.SEND_OK
