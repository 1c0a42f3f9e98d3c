"""Settings and durable facts of the ReplicasManager."""

import pytest
from power_cut import watching

from batonmq.replicas_manager.config import SessionTimings, controller_addresses, remoting_timings
from batonmq.replicas_manager.identity import IdentityError, IdentityFile, RoleFile, RoleFileError


def test_r34_the_default_times_fit_together():
    SessionTimings().check()


@pytest.mark.parametrize(
    ("times", "key"),
    [
        ({"heartbeat_ms": 150}, "masterLeaseMs"),
        ({"master_lease_ms": 500}, "masterLeaseMs"),
        ({"session_timeout_ms": 712}, "brokerSessionTimeoutMs"),
        ({"follower_heartbeat_ms": 800}, "brokerSessionFollowerHeartbeatMs"),
        ({"follower_heartbeat_ms": 50}, "brokerSessionFollowerHeartbeatMs"),
        ({"heartbeat_ms": 0}, "brokerSessionHeartbeatMs"),
    ],
)
def test_r34_times_that_contradict_each_other_are_named(times, key):
    with pytest.raises(ValueError, match=key):
        SessionTimings(**times).check()


def test_grpc_addresses_are_one_above_the_remoting_endpoints():
    assert controller_addresses("a:9878; b:9978;") == ("a:9879", "b:9979")
    assert controller_addresses("a:9878", "x:1;y:2") == ("x:1", "y:2")


def test_the_last_port_is_an_address_where_none_is_needed_above_it():
    assert controller_addresses("h:65535", protocol="remoting") == ("h:65535",)
    assert controller_addresses("h:1", "h:65535") == ("h:65535",)
    with pytest.raises(ValueError, match="controllerAddr: 'h:65535' leaves no gRPC port"):
        controller_addresses("h:65535")


def test_remoting_addresses_are_those_of_the_file():
    assert controller_addresses("a:9878; b:9978", protocol="remoting") == ("a:9878", "b:9978")


@pytest.mark.parametrize(("interval", "limit"), [(1000, 2000), (50, 10_000), (5000, 10_000)])
def test_r34_times_under_rocketmqs_controllers_that_contradict_each_other(interval, limit):
    """The lease must end before the controllers may call this broker dead."""
    with pytest.raises(ValueError, match=r"brokerHeartbeatInterval.*HeartBeatTimeoutMills"):
        remoting_timings(interval, limit)


@pytest.mark.parametrize(("interval", "limit"), [(1000, 5000), (1000, 10_000), (200, 1000)])
def test_r34_times_under_rocketmqs_controllers_fit(interval, limit):
    remoting_timings(interval, limit).check()


@pytest.mark.parametrize(
    "text", ["", " ; ", "host", "host:", "host:port", ":9878", "h:70000", "h:0", "h:²", "h:+1"]
)
def test_controller_addresses_that_are_none(text):
    with pytest.raises(ValueError, match="controllerAddr"):
        controller_addresses(text)


def test_a_check_code_is_durable_before_it_is_used(tmp_path):
    first = IdentityFile(tmp_path / "brokerIdentity", "C", "broker-a").load()
    second = IdentityFile(tmp_path / "brokerIdentity", "C", "broker-a").load()
    assert first == second
    assert first.broker_id == 0 and first.check_code


def test_a_torn_temporary_identity_is_made_anew(tmp_path):
    (tmp_path / "brokerIdentity-temp").write_text("C#brok")
    loaded = IdentityFile(tmp_path / "brokerIdentity", "C", "broker-a").load()
    assert loaded.broker_id == 0 and len(loaded.check_code) == 32


def test_a_temporary_identity_of_another_broker_is_refused(tmp_path):
    (tmp_path / "brokerIdentity-temp").write_text("C#broker-b#2#code")
    with pytest.raises(IdentityError, match="brokerName=broker-b"):
        IdentityFile(tmp_path / "brokerIdentity", "C", "broker-a").load()


@pytest.mark.parametrize(
    "end", [b"", b"#", b"#0", b"#-1", b"#x", "#\u00b2".encode(), b"#" + b"9" * 5000, b"\xff"]
)
def test_an_identity_whose_id_is_none_is_refused(tmp_path, end):
    (tmp_path / "brokerIdentity").write_bytes(b"C#broker-a" + end)
    with pytest.raises(IdentityError, match=r"brokerIdentity.*not an identity"):
        IdentityFile(tmp_path / "brokerIdentity", "C", "broker-a").load()


@pytest.mark.parametrize("name", ["", "a#b"])
def test_names_that_an_identity_cannot_hold(tmp_path, name):
    with pytest.raises(ValueError, match="brokerName"):
        IdentityFile(tmp_path / "brokerIdentity", "C", name)


def test_r2_the_role_file_keeps_the_highest_epoch(tmp_path):
    file = RoleFile(tmp_path / "masterEpoch")
    assert file.load() == 0
    for epoch in (3, 4, 7):
        file.store(epoch)
        assert RoleFile(tmp_path / "masterEpoch").load() == epoch


def test_r2_a_late_write_of_an_earlier_epoch_leaves_both_slots(tmp_path):
    """There was no thread for it; the write after it had one first."""
    file = RoleFile(tmp_path / "masterEpoch")
    file.load()
    for epoch in (1, 3, 2, 3, 4):
        file.store(epoch)
    assert [int(slot.split()[0]) for slot in file.path.read_text().splitlines()] == [3, 4]


def test_r2_an_accepted_epoch_outlives_a_power_cut(tmp_path):
    """Else a slave that was started again would take bytes of the master before."""
    with watching(tmp_path / "b") as cut:
        file = RoleFile(tmp_path / "b" / "masterEpoch")
        file.load()
        for epoch in (3, 4):
            file.store(epoch)
            left = cut.leave(tmp_path / f"left-{epoch}")
            assert RoleFile(left / "masterEpoch").load() == epoch


def test_r2_a_store_goes_over_the_older_slot(tmp_path):
    """Also after a restart: the epoch in force is never the one overwritten."""
    path = tmp_path / "masterEpoch"
    RoleFile(path).load()
    for epoch in (3, 4, 5):
        file = RoleFile(path)
        before = file.load()
        file.store(epoch)
        slots = {int(line.split()[0]) for line in path.read_bytes().splitlines()}
        assert slots == {before, epoch}


def test_r2_stores_of_one_process_go_to_the_slots_in_turn(tmp_path):
    path = tmp_path / "masterEpoch"
    file = RoleFile(path)
    file.load()
    for epoch in (3, 4, 5, 6):
        file.store(epoch)
        slots = {int(line.split()[0]) for line in path.read_bytes().splitlines()}
        assert slots == {epoch, epoch - 1 if epoch > 3 else 0}


@pytest.mark.parametrize("content", [b"", b"garbage", 128 * b" ", 128 * b"\xff"])
def test_r2_a_garbled_role_file_stops_the_start(tmp_path, content):
    """Taking it for 0 would let a master of the past be fed."""
    path = tmp_path / "masterEpoch"
    path.write_bytes(content)
    with pytest.raises(RoleFileError, match="masterEpoch"):
        RoleFile(path).load()


def test_r2_a_flipped_byte_in_either_slot_is_noticed(tmp_path):
    path = tmp_path / "masterEpoch"
    RoleFile(path).load()
    RoleFile(path).store(6)
    good = path.read_bytes()
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        with pytest.raises(RoleFileError, match="damaged"):
            RoleFile(path).load()
