"""When a message that a listener could not consume comes again. Pure.

With a broker that takes messages back (request 36) the broker decides. Without one the consumer
keeps the message and offers it again itself; its offset is not committed meanwhile, so that
neither a crash nor a rebalance loses it.
"""

FIRST_DELAY_MS = 1_000
LAST_DELAY_MS = 60_000

# How long a broker that answered "not supported" to a send-back is not asked again.
ASK_AGAIN_MS = 60_000


def redelivery_delay_ms(tries: int) -> int:
    """Delay before the next local delivery after `tries` >= 1 failed ones: 1 s doubling to 60 s."""
    return min(FIRST_DELAY_MS << min(tries - 1, 16), LAST_DELAY_MS)
