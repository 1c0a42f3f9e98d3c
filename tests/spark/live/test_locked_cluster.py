"""A cluster that takes TLS only, by the options and by a job as mqctl starts it."""

import json
import os
import subprocess
import sys

import pytest

from batonmq.client.errors import NoNameServerError
from batonmq.runtime.tls import TlsError
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.options import HistoryOptions, SinkOptions, TopicOptions
from batonmq.spark.live.topic_read import TopicRead
from lab.cluster.up import ClusterProcess
from tests.spark.spark_session import SMALL

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
TOPIC = "Locked"
BODIES = {f"m{number}" for number in range(40)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    locked = ClusterProcess(tmp_path_factory.mktemp("locked"), replicas=2)
    locked.argv += ["--secure", "enforcing"]
    with locked:
        yield locked


@pytest.fixture(scope="module")
def locks(cluster):
    """By which a client gets in: the authority, and for controllers a certificate."""
    tls = cluster.document["tls"]
    return {"trustCertPath": tls["trust"], "certPath": tls["cert"]}


def test_a_topic_is_written_and_read(session, cluster, locks):
    given = {"nameServers": cluster.name_servers, "topic": TOPIC, **locks}
    rows = session.createDataFrame([(body,) for body in BODIES], "body string")
    rows.write.format("batonmq").mode("append").options(**given).save()
    read = session.read.format("batonmq").options(table="topic", columns="body", **given).load()
    assert {bytes(row.body).decode() for row in read.collect()} == BODIES
    plain = {name: value for name, value in given.items() if name not in locks}
    options = TopicOptions.from_mapping({**plain, "operationTimeout": "500ms"})
    with pytest.raises(ClusterError) as refused:
        TopicRead(options).plan()
    assert isinstance(refused.value.__cause__, NoNameServerError)


def test_the_history_is_streamed(session, cluster, locks, tmp_path):
    source = {"table": "history", "controllers": ";".join(cluster.controllers), "columns": "kind"}
    events = session.readStream.format("batonmq").options(**source, **locks).load()
    kinds = []
    query = (
        events.writeStream.option("checkpointLocation", str(tmp_path / "at"))
        .trigger(availableNow=True)
        .foreachBatch(lambda batch, _: kinds.extend(row.kind for row in batch.collect()))
        .start()
    )
    query.awaitTermination()
    assert "elected" in kinds


def test_mqctl_keeps_the_topic_and_the_history_as_tables(cluster, tmp_path):
    """The jobs get the certificates of the local cluster with its addresses."""

    def told(*words):
        settings = [part for name, value in SMALL.items() for part in ("--conf", f"{name}={value}")]
        done = subprocess.run(
            [sys.executable, "-m", "batonmq.mqctl.main", *words, "--once", "--json", *settings],
            env=os.environ | {"BATONMQ_DATA": str(cluster.data_dir)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    topic = told("topicTable", TOPIC, "--to", str(tmp_path / "t"), "--value", "raw")
    assert topic["total"] == len(BODIES)
    history = told("streamHistory", "--output", str(tmp_path / "h"))
    assert history["total"] == history["events"] > 0


@pytest.mark.parametrize("kind", [TopicOptions, SinkOptions])
def test_how_a_connection_is_made_follows_from_what_is_given(kind, locks):
    def tls(**more):
        given = {"nameServers": "h:1", "topic": "T"} | more
        return kind.from_mapping(given).access.client_options().tls

    assert tls() is None and tls(tlsEnable="false", **locks) is None
    assert tls(tlsEnable="true").trust_cert_path == ""
    made = tls(**locks, checkHost="false")
    assert (made.trust_cert_path, made.cert_path) == tuple(locks.values()) and not made.check_host
    with pytest.raises(
        TlsError, match=r"/none\.pem: no certificates of an authority: No such file"
    ):
        tls(trustCertPath="/none.pem")
    with pytest.raises(ValueError, match="tlsEnable='yes': it must be true or false"):
        tls(tlsEnable="yes")


def test_what_grpc_cannot_do_is_refused_for_controllers(locks):
    for more in ({"checkHost": "false"}, {"keyPassword": "hidden"}):
        with pytest.raises(ValueError, match="not for controllers") as refused:
            HistoryOptions.from_mapping({"controllers": "h:1", **locks, **more})
        assert "hidden" not in str(refused.value)
