"""Errors with a sentence for people: Spark shows them without Python's traceback. Free of Spark."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from batonmq.protocol.errors import BatonError


@contextmanager
def sentences() -> Iterator[None]:
    """Around what Spark calls in a Python process of its own. What is raised by a library, such as
    a JSONDecodeError, is a bug and keeps its traceback."""
    try:
        yield
    except (ValueError, OSError, BatonError) as error:
        of_library = isinstance(error, ValueError) and type(error) is not ValueError
        if of_library and not type(error).__module__.startswith("batonmq."):
            raise
        main = getattr(sys.modules["__main__"], "__spec__", None)
        if main is not None and main.name.startswith("pyspark."):
            # Spark looks for it only now; the error ends this process.
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise
