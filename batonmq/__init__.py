"""The Python client of a BatonMQ or RocketMQ cluster.

`Producer`, `PushConsumer`, `PullConsumer` and `Admin` are asyncio classes; `batonmq.blocking` wraps
them for scripts. Names are loaded on first use, so that importing the package costs next to
nothing (the admin CLI answers `--help` without the network stack).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq.admin import Admin
    from batonmq.client_instance import ClientInstance, ClientOptions
    from batonmq.consume_types import (
        ConsumeContext,
        ConsumeFromWhere,
        ConsumeStatus,
        MessageModel,
    )
    from batonmq.controller_admin import ControllerAdmin
    from batonmq.errors import (
        ClientClosedError,
        ClientError,
        MessageIllegalError,
        NoMasterError,
        NoRouteError,
        SendFailedError,
        UnsupportedByBrokerError,
    )
    from batonmq.producer import Producer
    from batonmq.pull_consumer import PullConsumer
    from batonmq.pull_result import PullResult, PullStatus
    from batonmq.push_consumer import PushConsumer
    from batonmq.send_result import SendResult, SendStatus
    from protocol.message import Message, MessageExt, MessageQueue

_HOMES = {
    "Admin": "batonmq.admin",
    "ClientClosedError": "batonmq.errors",
    "ClientError": "batonmq.errors",
    "ClientInstance": "batonmq.client_instance",
    "ClientOptions": "batonmq.client_instance",
    "ConsumeContext": "batonmq.consume_types",
    "ConsumeFromWhere": "batonmq.consume_types",
    "ConsumeStatus": "batonmq.consume_types",
    "ControllerAdmin": "batonmq.controller_admin",
    "Message": "protocol.message",
    "MessageExt": "protocol.message",
    "MessageIllegalError": "batonmq.errors",
    "MessageModel": "batonmq.consume_types",
    "MessageQueue": "protocol.message",
    "NoMasterError": "batonmq.errors",
    "NoRouteError": "batonmq.errors",
    "Producer": "batonmq.producer",
    "PullConsumer": "batonmq.pull_consumer",
    "PullResult": "batonmq.pull_result",
    "PullStatus": "batonmq.pull_result",
    "PushConsumer": "batonmq.push_consumer",
    "SendFailedError": "batonmq.errors",
    "SendResult": "batonmq.send_result",
    "SendStatus": "batonmq.send_result",
    "UnsupportedByBrokerError": "batonmq.errors",
}

__all__ = [
    "Admin",
    "ClientClosedError",
    "ClientError",
    "ClientInstance",
    "ClientOptions",
    "ConsumeContext",
    "ConsumeFromWhere",
    "ConsumeStatus",
    "ControllerAdmin",
    "Message",
    "MessageExt",
    "MessageIllegalError",
    "MessageModel",
    "MessageQueue",
    "NoMasterError",
    "NoRouteError",
    "Producer",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "PushConsumer",
    "SendFailedError",
    "SendResult",
    "SendStatus",
    "UnsupportedByBrokerError",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'batonmq' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
