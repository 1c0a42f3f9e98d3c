"""The steps of a cut of the log, in the order in which they become durable (R22)."""

STEPS = (
    "intent", "checkpoint", "consume_queues", "index", "segments", "zero", "epochs", "done",
)  # fmt: skip
