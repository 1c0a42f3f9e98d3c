"""Admin calls about the cluster as a whole and about one broker."""

from collections.abc import Iterable, Mapping

from batonmq.client.admin.requests import AdminRequests
from batonmq.client.errors import ClientError, NoMasterError
from batonmq.protocol.bodies import ClusterInfo, EpochEntryCache, HARuntimeInfo, KVTable
from batonmq.protocol.codes import MASTER_ID, RequestCode
from batonmq.protocol.json_body import decode_json
from batonmq.remoting.command import RemotingCommand
from batonmq.runtime.properties_text import parse_properties
from batonmq.runtime.tls import TlsState


class ClusterAdmin:
    def __init__(self, requests: AdminRequests) -> None:
        self._requests = requests

    async def info(self) -> ClusterInfo:
        """All broker groups and their brokers, as a name server knows them."""
        name_servers = self._requests.client.name_servers
        return await name_servers.cluster_info(deadline_ms=self._requests.deadline_ms())

    async def name_server_states(self) -> dict[str, str | None]:
        """Address -> None if that name server answers, else what is wrong."""
        request = RemotingCommand.request(RequestCode.GET_BROKER_CLUSTER_INFO)
        answers = await self._requests.client.name_servers.invoke_each(
            request, deadline_ms=self._requests.deadline_ms()
        )
        return {
            address: str(answer) if isinstance(answer, Exception) else None
            for address, answer in answers.items()
        }

    async def tls(self, address: str) -> TlsState:
        """What the broker, name server or controller at `address` says of its TLS."""
        reply = await self._requests.ask(address, RequestCode.BATON_GET_TLS, {}, "its TLS")
        return decode_json(TlsState, reply.body)

    async def masters(
        self, cluster: str | None = None, broker: str | None = None
    ) -> dict[str, str]:
        """Broker name -> master address, for a cluster, one broker group, or all. `broker` may also
        be an address. Raises ClientError if nothing matches, NoMasterError for a group without a
        master."""
        # An address works where no name server knows the broker.
        if broker is not None and ":" in broker:
            return {broker: broker}
        info = await self.info()
        if cluster is not None:
            info = only_cluster(info, cluster)
        if broker is not None:
            info = only_group(info, broker)
        found, without = masters_of(info)
        # Not left out: a change would be missing in that group once it has a master again.
        if without:
            raise NoMasterError(without[0])
        if not found:
            raise ClientError("the name server knows no broker: start one and let it register")
        return found

    async def targets(self, cluster: str | None, broker: str | None) -> dict[str, str]:
        """The masters that a change must reach. Raises ClientError if neither argument is given."""
        if cluster is None and broker is None:
            raise ClientError("say where: give a cluster (all its masters) or one broker")
        return await self.masters(cluster, broker)


class BrokerAdmin:
    def __init__(self, requests: AdminRequests) -> None:
        self._requests = requests

    async def runtime_info(self, address: str) -> dict[str, str]:
        """RocketMQ's runtime figures (brokerVersionDesc, msgPutTotalTodayNow, …) of one broker."""
        code = RequestCode.GET_BROKER_RUNTIME_INFO
        return dict((await self._requests.read(KVTable, address, code, {}, "runtime info")).table)

    async def config(self, address: str) -> dict[str, str]:
        """All settings of one broker, as in force."""
        code = RequestCode.GET_BROKER_CONFIG
        reply = await self._requests.ask(address, code, {}, "broker settings")
        return parse_properties(reply.body.decode())

    async def update_config(self, address: str, settings: Mapping[str, str]) -> str:
        """Changes settings of a running broker, all or none; they survive a restart. Returns a
        warning that names RocketMQ's keys without effect here, or "". Raises ResponseError for a
        key that cannot be changed while running or a bad value, ClientError for a line break."""
        code = RequestCode.UPDATE_BROKER_CONFIG
        what = "changing broker settings"
        return await self._requests.change_settings(address, code, settings, what)

    async def ha_status(self, address: str) -> HARuntimeInfo:
        """On a master its slaves and how far each is behind, on a slave its master."""
        code = RequestCode.GET_BROKER_HA_STATUS
        return await self._requests.read(HARuntimeInfo, address, code, {}, "HA status")

    async def epochs(self, address: str) -> EpochEntryCache:
        """The epochs of one replica's log. Raises ResponseError outside controller mode."""
        code = RequestCode.GET_BROKER_EPOCH_CACHE
        return await self._requests.read(EpochEntryCache, address, code, {}, "epochs")

    async def repair(self, address: str, suspect: str) -> str:
        """Makes one broker trust its log again; returns what was done.

        `suspect`: why its log is suspect, as its runtime info reports it. Raises ResponseError if
        that is not the reason."""
        reply = await self._requests.ask(
            address, RequestCode.BATON_REPAIR_REPLICA, {"suspect": suspect}, "repair"
        )
        return reply.remark or ""


def only_cluster(info: ClusterInfo, cluster: str) -> ClusterInfo:
    """Raises ClientError for a cluster that the name server does not know."""
    names = info.cluster_addr_table.get(cluster)
    if names is None:
        raise ClientError(f"no cluster {cluster}: {_known(info.cluster_addr_table)}")
    return ClusterInfo(
        broker_addr_table={n: d for n, d in info.broker_addr_table.items() if n in names},
        cluster_addr_table={cluster: names},
    )


def only_group(info: ClusterInfo, broker_name: str) -> ClusterInfo:
    """Raises ClientError for a broker group that the name server does not know."""
    data = info.broker_addr_table.get(broker_name)
    if data is None:
        raise ClientError(f"no broker group {broker_name}: {_known(info.broker_addr_table)}")
    return ClusterInfo(
        broker_addr_table={broker_name: data}, cluster_addr_table=info.cluster_addr_table
    )


def masters_of(info: ClusterInfo) -> tuple[dict[str, str], list[str]]:
    """Broker name -> its master, and the broker groups without one; both ascending."""
    table = sorted(info.broker_addr_table.items())
    masters = {name: data.broker_addrs.get(MASTER_ID) for name, data in table}
    found = {name: address for name, address in masters.items() if address is not None}
    return found, [name for name in masters if name not in found]


def _known(names: Iterable[str]) -> str:
    return f"the name server knows {', '.join(sorted(names)) or 'none'}"
