"""Streams into tables that run in this process, on the session of the tests, and their end."""

import threading
from contextlib import contextmanager
from unittest.mock import patch

from lab.cluster.processes import wait_for

PATIENCE_S = 240.0


class Died(Exception):
    """The driver, in this process."""


@contextmanager
def dying(stream, session, table, last):
    """The stream, until it has failed between the commit of batch `last` in its table, of that
    class, and the checkpoint's."""
    commit = table.commit

    def commit_and_die(self, rows, state):
        commit(self, rows, state)
        if state.batch == last:
            raise Died

    with (
        patch.object(table, "commit", commit_and_die),
        running(stream, session, ends_with=Died) as thread,
    ):
        yield
        wait_for("the driver's death", lambda: not thread.is_alive(), PATIENCE_S)


@contextmanager
def running(stream, session, ends_with=None):
    """The stream, until the block ends. `ends_with`: an error that it raises."""
    stopping, failed = threading.Event(), []

    def run():
        try:
            stream.run(session, stopping)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        stopping.set()
        thread.join(PATIENCE_S)
    assert not thread.is_alive(), "the stream hangs"
    assert [type(error) for error in failed] == [ends_with] * bool(ends_with), failed
