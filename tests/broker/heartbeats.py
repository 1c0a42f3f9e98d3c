"""The heartbeat of a consumer that is a producer, too."""

from batonmq.protocol.bodies import ConsumerData, HeartbeatData, ProducerData, SubscriptionData


def heartbeat(client: str, *topics: str, group: str = "g", version: int = 1) -> HeartbeatData:
    return HeartbeatData(
        client_id=client,
        consumer_data_set=[
            ConsumerData(
                group_name=group,
                consume_type="CONSUME_PASSIVELY",
                message_model="CLUSTERING",
                consume_from_where="CONSUME_FROM_LAST_OFFSET",
                subscription_data_set=[
                    SubscriptionData(topic=topic, sub_string="*", sub_version=version)
                    for topic in topics
                ],
            )
        ],
        producer_data_set=[ProducerData(group_name="p")],
    )
