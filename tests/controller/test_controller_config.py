"""The `controller:` section: peers and ports, and the relations of its times (R34)."""

import pytest

from batonmq.controller.config import ControllerConfig, RuntimeConfig, parse_peers
from batonmq.protocol.errors import ConfigError
from batonmq.runtime.settings import load_settings

PEERS = "n0-127.0.0.1:9878;n1-127.0.0.1:9978;n2-127.0.0.1:10078"


def test_endpoints_stand_above_the_remoting_address():
    config = ControllerConfig(controller_peers=PEERS, controller_self_id="n1")
    assert config.self_peer.remoting_address == "127.0.0.1:9978"
    assert config.self_peer.grpc_address == "127.0.0.1:9979"
    assert config.self_peer.raft_address == "127.0.0.1:9980"
    assert [peer.node_id for peer in config.peers] == ["n0", "n1", "n2"]


def test_peer_hosts_may_hold_dashes():
    (peer,) = parse_peers("n0-my-host.example:9878", 1, 2)
    assert (peer.node_id, peer.host, peer.port) == ("n0", "my-host.example", 9878)


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ("", "needs at least one"),
        ("127.0.0.1:9878", "is not of the form"),
        ("../n0-127.0.0.1:9878", "is not of the form"),
        ("n0-127.0.0.1:9878;n0-127.0.0.1:9978", "is listed twice"),
        ("n0-127.0.0.1:9878;n1-127.0.0.1:9878", "is listed twice"),
        ("n0-127.0.0.1:65535", "leaves no ports"),
        ("n0-127.0.0.1:9878;n1-127.0.0.1:9879", "leave ports"),
        ("n7-127.0.0.1:9878", r"controllerDLegerSelfId: 'n0' is not among the peers \(n7\)"),
    ],
)
def test_bad_peers_are_said(peers, said):
    with pytest.raises(ValueError, match=said):
        ControllerConfig(controller_peers=peers)


def test_nodes_may_meet_at_other_hosts_than_admin_tools_dial():
    config = ControllerConfig(
        controller_peers="n0-10.0.0.1:9878;n1-10.0.0.1:9888",
        controller_inner_hosts="n0-namesrv-1; n1-namesrv-2",
    )
    assert [
        (peer.remoting_address, peer.grpc_address, peer.raft_address) for peer in config.peers
    ] == [
        ("10.0.0.1:9878", "namesrv-1:9879", "namesrv-1:9880"),
        ("10.0.0.1:9888", "namesrv-2:9889", "namesrv-2:9890"),
    ]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("n0-a:9880", "'n0-a:9880' is not of the form id-host"),
        ("n0-a;n0-b", "id n0 is listed twice"),
        ("n7-a", "n7 is not among the peers"),
    ],
)
def test_bad_inner_hosts_are_said(hosts, said):
    with pytest.raises(ValueError, match=f"controllerInnerHosts: {said}"):
        ControllerConfig(controller_inner_hosts=hosts)


@pytest.mark.parametrize("name", ["old.yaml", "old.conf"])
def test_settings_of_earlier_versions_are_named_and_passed_over(tmp_path, caplog, name):
    """`batonmq up` and operators wrote them; a new version starts with their files."""
    lines = ["historyTopicGroup: broker-b", "historyTopicBatch: 7", "historyFiles: 3"]
    yaml = "\n  ".join(["controller:", *lines])
    (tmp_path / name).write_text(yaml if name.endswith("yaml") else "\n".join(lines))
    environ = {"BATONMQ_CONTROLLER__HISTORYTOPICDELAYMS": "5"}
    sections = {"controller": ControllerConfig}
    config = load_settings(tmp_path / name, sections, environ=environ)["controller"]
    assert config == ControllerConfig(history_files=3)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[:2] for line in told] == [
        ["setting_no_longer_used", "key=historyTopicGroup"],
        ["setting_no_longer_used", "key=historyTopicBatch"],
        ["setting_no_longer_used", "key=HISTORYTOPICDELAYMS"],
    ]
    assert f"where={tmp_path / name}:" in told[0]


def test_a_kept_setting_of_an_earlier_version_is_named_and_passed_over(tmp_path, caplog):
    kept = tmp_path / "controller.properties"
    kept.write_text("brokerGroupsMax=7\nhistoryTopicGroup=none\n")
    runtime = RuntimeConfig(ControllerConfig(controller_store_path=str(tmp_path)))
    runtime.load()
    assert runtime.current.broker_groups_max == 7
    assert f"setting_no_longer_used key=historyTopicGroup where={kept}" in caplog.text


@pytest.mark.parametrize(
    ("key", "fits", "does_not", "said"),
    [
        ("broker_session_timeout_ms", 713, 712, "brokerSessionTimeoutMs: 712 must exceed"),
        ("broker_session_heartbeat_ms", 149, 150, "masterLeaseMs: 600 must exceed"),
        ("raft_election_timeout_max_ms", 799, 800, "raftElectionTimeoutMaxMs: 800 must stay below"),
        ("raft_election_timeout_max_ms", 301, 300, "raftElectionTimeoutMaxMs: 300 must exceed"),
        ("raft_heartbeat_ms", 99, 100, "raftElectionTimeoutMinMs: 300 must exceed"),
    ],
    ids=["session", "two heartbeats and a pause", "failover", "election", "Raft's heartbeats"],
)
def test_r34_the_lease_ends_before_the_session_does(key, fits, does_not, said):
    """And each of the other times leaves room for the next."""
    ControllerConfig(**{key: fits})
    with pytest.raises(ValueError, match=said):
        ControllerConfig(**{key: does_not})


def test_reads_rocketmqs_keys_and_names_the_bad_one(tmp_path):
    good = tmp_path / "good.conf"
    good.write_text(
        f"controllerDLegerGroup=g\ncontrollerDLegerPeers={PEERS}\ncontrollerDLegerSelfId=n2\n"
        "enableElectUncleanMaster=true\ncontrollerStorePath=/x\n"
    )
    config = load_settings(good, {"controller": ControllerConfig}, environ={})["controller"]
    assert isinstance(config, ControllerConfig)
    assert config.self_peer.port == 10078
    assert config.enable_elect_unclean_master
    assert config.config_path == "/x/controller.properties"

    bad = tmp_path / "bad.yaml"
    bad.write_text("controller:\n  masterLeaseMs: 400\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml:2.*masterLeaseMs"):
        load_settings(bad, {"controller": ControllerConfig}, environ={})
