"""What settings of the name server change in a route. Pure."""

from collections.abc import Callable

from batonmq.namesrv.live import BrokerLiveTable
from batonmq.protocol.bodies import PERM_WRITE, BrokerData, QueueData, TopicRouteData
from batonmq.protocol.codes import MASTER_ID


def relabel_acting_master(data: BrokerData, queue: QueueData) -> None:
    """If the group has no id 0 and its slaves may act as master, its lowest id is shown as 0."""
    addrs = data.broker_addrs
    if not data.enable_acting_master or not addrs or MASTER_ID in addrs:
        return
    if not queue.perm & PERM_WRITE:
        acting = addrs.pop(min(addrs))
        data.broker_addrs = {MASTER_ID: acting, **addrs}


def add_replica_routes(
    route: TopicRouteData, most_members: Callable[[str], int], live: BrokerLiveTable
) -> None:
    """Adds write-only queues that lead to a group's master through its slaves: n members get n - 1
    more names (`NAME%1`, …), each with a living slave that passes requests on as its master."""
    # A stock producer retries a failed send at another broker name only: when the master dies, it
    # retries there.
    for data, queue in list(zip(route.broker_datas, route.queue_datas, strict=True)):
        if not queue.perm & PERM_WRITE:
            continue
        addrs = data.broker_addrs
        relays = {
            id_: addr
            for id_, addr in addrs.items()
            if (known := live.get((data.cluster, addr))) is not None and known.relays
        }
        ways = [addr for id_, addr in relays.items() if id_ != MASTER_ID] or list(relays.values())
        count = most_members(data.broker_name) if ways else 0
        # The names stay when members come and go: a producer that chooses a queue by a key
        # must not see the list change.
        for number in range(1, count):
            name = f"{data.broker_name}%{number}"
            at = {MASTER_ID: ways[(number - 1) % len(ways)]}
            route.broker_datas.append(
                BrokerData(broker_addrs=at, broker_name=name, cluster=data.cluster)
            )
            route.queue_datas.append(
                QueueData(
                    broker_name=name,
                    perm=PERM_WRITE,
                    read_queue_nums=1,
                    topic_sys_flag=queue.topic_sys_flag,
                    write_queue_nums=1,
                )
            )
