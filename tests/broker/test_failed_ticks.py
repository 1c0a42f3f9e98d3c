"""A regular task of the broker that fails: the process says so and ends, another replica leads."""

import asyncio
import logging

import pytest
from lone_broker import lone_broker


@pytest.mark.parametrize("task, of", [("broker-tick", "status"), ("broker-clients", "clients")])
async def test_a_task_that_fails_ends_the_broker_and_names_itself(
    tmp_path, monkeypatch, caplog, task, of
):
    """Without ticks sends fail late, and nothing is registered any more."""

    async with lone_broker(tmp_path) as rig:
        assert (await rig.send()).code == 0
        service, ended = rig.service, asyncio.get_running_loop().create_future()
        monkeypatch.setattr(service, "_on_fatal", ended.set_result)

        def broken(*_):
            raise LookupError("a tick met what it does not know")

        monkeypatch.setattr(getattr(service, of), "tick", broken)
        with caplog.at_level(logging.CRITICAL):
            assert isinstance(await ended, LookupError)
        assert (await rig.send()).remark == (
            f"this broker ends, its task {task} failed: a tick met what it does not know"
        )
    (reported,) = caplog.records
    assert f"task={task}" in reported.getMessage() and "in broken" in caplog.text
    assert not (tmp_path / "abort").exists() and not (tmp_path / "suspect").exists()
