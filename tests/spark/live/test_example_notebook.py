"""The notebook among the examples, cell by cell, against a running cluster and its files."""

import asyncio
import runpy
import sys

from batonmq import Message, Producer
from lab.cluster.processes import ROOT

TOPIC = "ExampleNotebook"


async def send(name_servers):
    async with Producer("notebook", name_servers=name_servers) as producer:
        for number in range(20):
            tags = "coffee" if number % 2 else "tea"
            message = Message.of(TOPIC, f"drink {number}", tags=tags, keys=f"order-{number}")
            assert (await producer.send(message)).acknowledged


def test_the_notebook_reads_streams_and_writes(
    session, live_cluster, tmp_path, monkeypatch, capsys
):
    names = live_cluster.name_servers
    asyncio.run(send(names))
    arguments = ["--name-servers", names, "--topic", TOPIC]
    arguments += ["--data", str(live_cluster.data_dir), "--output", str(tmp_path)]
    notebook = ROOT / "examples" / "spark_notebook.py"
    monkeypatch.setattr(sys, "argv", [str(notebook), *arguments])
    made = runpy.run_path(str(notebook))
    assert made["spark"] is session
    assert {row["tags"]: row["count"] for row in made["drinks"].collect()} == {
        "coffee": 10,
        "tea": 10,
    }
    assert "messages in the lake: 20" in capsys.readouterr().out
    assert made["epochs"].count() >= 3
    assert made["events"].filter("kind = 'elected'").count() >= 1
    written = session.read.format("batonmq").options(
        table="topic", nameServers=names, topic=f"{TOPIC}Summary"
    )
    assert {row["keys"] for row in written.load().collect()} == {"coffee", "tea"}
