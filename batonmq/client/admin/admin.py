"""Typed admin calls, grouped by subject. Origin: DefaultMQAdminExtImpl."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from batonmq.client.admin.cluster import BrokerAdmin, ClusterAdmin
from batonmq.client.admin.requests import AdminRequests
from batonmq.client.instance.client_instance import ClientInstance, InstanceUser
from batonmq.client.instance.connections import ClientOptions

if TYPE_CHECKING:
    from batonmq.client.admin.consumer_groups import ConsumerGroupAdmin
    from batonmq.client.admin.controller_admin import ControllerAdmin
    from batonmq.client.admin.messages import MessageAdmin
    from batonmq.client.admin.topics import TopicAdmin
    from batonmq.client.admin.users import UserAdmin


class Admin(InstanceUser):
    """`async with Admin(name_servers="host:9876") as admin: await admin.topics.names()`

    Its parts are `brokers`, `cluster`, `consumer_groups`, `messages`, `topics` and `users`.
    Calls raise NoNameServerError, NoRouteError, NoMasterError, ConnectError, RequestTimeoutError,
    UnsupportedByBrokerError, and ResponseError for other refusals."""

    def __init__(
        self,
        name_servers: str | Sequence[str] | None = None,
        *,
        client: ClientInstance | None = None,
        client_options: ClientOptions | None = None,
        timeout_ms: int = 5_000,
    ) -> None:
        super().__init__(name_servers, client, client_options)
        self._requests = AdminRequests(self._client, timeout_ms)

    @cached_property
    def cluster(self) -> ClusterAdmin:
        return ClusterAdmin(self._requests)

    @cached_property
    def brokers(self) -> BrokerAdmin:
        return BrokerAdmin(self._requests)

    # Imported on demand: `mqctl health` needs none of them, and imports are slow on a busy host.

    @cached_property
    def topics(self) -> TopicAdmin:
        from batonmq.client.admin.topics import TopicAdmin

        return TopicAdmin(self._requests, self.cluster)

    @cached_property
    def messages(self) -> MessageAdmin:
        from batonmq.client.admin.messages import MessageAdmin

        return MessageAdmin(self._requests)

    @cached_property
    def consumer_groups(self) -> ConsumerGroupAdmin:
        from batonmq.client.admin.consumer_groups import ConsumerGroupAdmin

        return ConsumerGroupAdmin(self._requests, self.cluster)

    @cached_property
    def users(self) -> UserAdmin:
        from batonmq.client.admin.users import UserAdmin

        return UserAdmin(self._requests, self.cluster)

    def controller(self, addresses: str | Sequence[str]) -> ControllerAdmin:
        """Admin calls to the controllers at these remoting addresses."""
        from batonmq.client.admin.controller_admin import ControllerAdmin

        return ControllerAdmin(self._requests, addresses)
