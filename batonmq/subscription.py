"""What a consumer wants from a topic: a tag expression and its compiled form. Pure.

Origin: FilterAPI.buildSubscriptionData. The broker filters by tag *hash*; as hashes collide, the
client filters by the tag itself once more.
"""

from collections.abc import Iterable, Sequence

from protocol.bodies import SubscriptionData
from protocol.errors import BatonError
from protocol.message import MessageExt
from protocol.tags import java_string_hash

ALL = "*"


def build_subscription(topic: str, expression: str, version_ms: int) -> SubscriptionData:
    """`expression`: `*` or empty for all, else tags joined by `||`. Raises BatonError if no tag."""
    text = expression.strip()
    if not text or text == ALL:
        return SubscriptionData(topic=topic, sub_string=ALL, sub_version=version_ms)
    tags = sorted({tag.strip() for tag in text.split("||")} - {""})
    if not tags:
        raise BatonError(
            f"subscription {expression!r} of {topic} names no tag: use '*' or 'a || b'"
        )
    return SubscriptionData(
        topic=topic,
        sub_string=text,
        tags_set=tags,
        code_set=[java_string_hash(tag) for tag in tags],
        sub_version=version_ms,
    )


def wanted_only(
    messages: Iterable[MessageExt], subscription: SubscriptionData
) -> Sequence[MessageExt]:
    tags = frozenset(subscription.tags_set)
    if not tags:
        return list(messages)
    return [m for m in messages if m.properties.get("TAGS") in tags]
