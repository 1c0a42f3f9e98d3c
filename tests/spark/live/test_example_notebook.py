"""The notebook among the examples, cell by cell, against a running cluster and its files."""

import asyncio
import re
import runpy
import sys

from batonmq import Message, Producer
from lab.cluster.processes import ROOT
from tests.spark.table_rows import topic

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
    assert runpy.run_path(str(notebook))["spark"] is session
    by_tag, orders, epochs, events = shown(capsys.readouterr().out)
    assert {tag: count for tag, count, _ in by_tag} == {"coffee": "10", "tea": "10"}
    assert len(orders) == 5
    for keys, body, _, _ in orders:
        assert keys.removeprefix("order-") == body.removeprefix("drink ")
    assert len(epochs) >= 3 and {int(row[1]) for row in epochs} >= {1}
    assert len(events) >= 1
    written = topic({"nameServers": names, "topic": f"{TOPIC}Summary"})
    assert {row["keys"] for row in written} == {"coffee", "tea"}


def shown(text):
    """The rows of each table that the notebook shows, between the lines of its frame."""
    assert "messages in the lake: 20" in text
    tables = re.findall(r"(?:^[+|].*\n)+", text, re.M)
    return [
        [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[3:-1]]
        for table in tables
    ]
