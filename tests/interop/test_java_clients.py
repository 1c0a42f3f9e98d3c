"""The stock Java client 5.3.3 against a real cluster: every way to send, and a push consumer.

Each program prints what it saw; the tests compare that with what the queues hold.
"""

from collections import Counter

import pytest

from lab.cluster.queues import read_topic, stored_keys
from lab.cluster.up import ClusterProcess
from tests.interop.conftest import RunJava

pytestmark = pytest.mark.java

COUNT = 24


def sent_keys(*modes: str) -> set[str]:
    return {f"{mode}-{number}" for mode in modes for number in range(COUNT)}


@pytest.mark.parametrize("headers", ["json", "rocketmq"])
def test_every_way_to_send(java_cluster: ClusterProcess, run_java: RunJava, headers: str) -> None:
    """Sync, async, oneway, batch and ordered sends of DefaultMQProducer, into a new topic.

    Every SendResult has SEND_OK and the place of the message; the queues hold each message
    once, also the oneway ones; the ordered ones went to the queues their selector named, in order.
    A push consumer gets them all. With `rocketmq` the clients write binary headers.
    """
    topic, servers = f"JavaSends-{headers}", java_cluster.name_servers
    modes = ("sync", "async", "oneway", "batch", "ordered")
    is_binary = headers == "rocketmq"
    with run_java("Produce", servers, binary_headers=is_binary) as producer:
        producer.send(" ".join((topic, str(COUNT), *modes)))
        producer.wait_for("its sends", lambda: producer.of("produced"))
        results = producer.of("mode")
        producer.finish()

    assert [line for line in results if line.get("status") != "SEND_OK"] == []
    counts = {"sync": COUNT, "async": COUNT, "ordered": COUNT, "batch": 1}
    assert Counter(line["mode"] for line in results) == counts
    assert stored_keys(servers, topic) == Counter(sent_keys(*modes))

    stored = read_topic(servers, topic)
    for line in results:
        if line["mode"] == "batch":
            continue
        message = stored[line["queueId"]][line["queueOffset"]]
        assert (message.properties["KEYS"], message.msg_id) == (line["key"], line["offsetMsgId"])
        assert message.body == f"body of {line['key']}".encode()
    (batch,) = (line for line in results if line["mode"] == "batch")
    first = batch["queueOffset"]
    in_batch = stored[batch["queueId"]][first : first + COUNT]
    assert [m.properties["KEYS"] for m in in_batch] == [f"batch-{i}" for i in range(COUNT)]
    assert batch["offsetMsgId"] == ",".join(m.msg_id for m in in_batch)

    ordered = [line for line in results if line["mode"] == "ordered"]
    by_queue = [[line["queueOffset"] for line in ordered[lane::3]] for lane in range(3)]
    assert all(offsets == sorted(offsets) for offsets in by_queue)
    assert all(len({line["queueId"] for line in ordered[lane::3]}) == 1 for lane in range(3))

    reads = (servers, f"java-{headers}", topic)
    with run_java("Consume", *reads, binary_headers=is_binary) as consumer:
        wanted = sent_keys(*modes)
        consumer.wait_for("all", lambda: {line["key"] for line in consumer.of("key")} == wanted)
        consumer.finish()
