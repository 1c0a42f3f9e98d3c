"""Spark registers the DefaultSource of each module named `pyspark_…` that it finds by itself.

So `format("batonmq")` and `USING batonmq` work in every session whose Python has this package.
"""

from batonmq.spark.source import BatonmqSource as DefaultSource

__all__ = ["DefaultSource"]
