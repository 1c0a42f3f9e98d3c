"""A cluster that takes TLS only, by the options and by a job as mqctl starts it."""

import os
from importlib import import_module
from unittest.mock import patch

import pytest

from batonmq.auth.given import TLS_VARIABLES
from batonmq.client.errors import NoNameServerError
from batonmq.runtime.tls import TlsError
from batonmq.spark.live.cluster import ClusterError
from batonmq.spark.live.history_feed import HistoryFeed
from batonmq.spark.live.options import HistoryOptions, SinkOptions, TopicOptions
from batonmq.spark.session import register
from lab.cluster.up import ClusterProcess
from tests.spark.spark_session import SMALL
from tests.spark.table_rows import topic

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")
SOAK = os.environ.get("BATONMQ_SOAK") == "1"
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
    assert {row["body"].decode() for row in topic({**given, "columns": "body"})} == BODIES
    plain = {name: value for name, value in given.items() if name not in locks}
    with pytest.raises(ClusterError) as refused:
        topic({**plain, "operationTimeout": "500ms"})
    assert isinstance(refused.value.__cause__, NoNameServerError)


def test_the_history_is_read(cluster, locks):
    given = {"controllers": ";".join(cluster.controllers), **locks}
    feed = HistoryFeed(HistoryOptions.from_mapping(given))
    try:
        start = feed.initial()
        assert "elected" in {event.kind for event in feed.between(start, feed.next_end(start, 0))}
    finally:
        feed.close()


@pytest.fixture
def in_this_process(session, monkeypatch):
    """A job that mqctl becomes runs here, on the session that is there: no JVM is started."""
    environment = session.sparkContext.environment
    before = dict(environment)

    def execve(_, argv, environ):
        # A JVM that the job starts would inherit them, and hand them to its Python processes.
        environment.update({name: environ[name] for name in TLS_VARIABLES.values()})
        with patch.dict(os.environ, environ):
            import_module(argv[2]).main(argv[3:])

    monkeypatch.setattr(os, "execve", execve)
    yield
    environment.clear()
    environment.update(before)
    register(session)


def test_mqctl_keeps_the_topic_and_the_history_as_tables(request, cluster, tmp_path):
    """The jobs get the certificates of the local cluster with its addresses. `make soak` starts
    them as processes."""
    if not SOAK:
        request.getfixturevalue("in_this_process")

    def ran(*words):
        settings = [part for name, value in SMALL.items() for part in ("--conf", f"{name}={value}")]
        run = cluster.mqctl_program if SOAK else cluster.mqctl
        done = run(*words, "--once", "--json", *settings)
        assert done.code == 0, done.err
        return done.json

    orders = ran("topicTable", TOPIC, "--to", str(tmp_path / "t"), "--value", "raw")
    assert orders["total"] == len(BODIES)
    history = ran("streamHistory", "--output", str(tmp_path / "h"))
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
