"""Streams into tables that run in this process, on the session of the tests, and their end."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from unittest.mock import patch

from lab.cluster.processes import wait_for

SOAK = os.environ.get("BATONMQ_SOAK") == "1"
PATIENCE_S = 240.0
# A job that dies with its JVM between the commit of a batch in its table and the checkpoint's.
DYING = """
import os, signal
from {job} import main
from {module} import {table} as Table

commit = Table.commit

def commit_and_die(self, rows, state):
    commit(self, rows, state)
    if state.batch == {last}:
        os.killpg(0, signal.SIGKILL)

Table.commit = commit_and_die
main()
"""


class Died(Exception):
    """The driver, in this process."""


@contextmanager
def dying(stream, session, last, job, arguments):
    """A driver, until it has died behind the commit of batch `last`: the stream fails in this
    process; under `make soak` the job is a process with these arguments, and is killed."""
    table = type(stream._table)
    if SOAK:
        text = DYING.format(
            job=job.__name__, module=table.__module__, table=table.__name__, last=last
        )
        driver = subprocess.Popen([sys.executable, "-c", text, *arguments], start_new_session=True)
        try:
            yield
            assert driver.wait(PATIENCE_S) == -signal.SIGKILL
        finally:
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
        return
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
