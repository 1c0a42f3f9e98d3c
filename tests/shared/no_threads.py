"""A process whose limit of threads is reached."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def no_new_threads() -> Iterator[None]:
    with patch.object(
        threading.Thread, "start", side_effect=RuntimeError("can't start new thread")
    ):
        yield
