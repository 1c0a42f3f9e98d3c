"""What `batonmq up` decides before it starts anything: configuration files, and a disk too full."""

import asyncio
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest
import yaml
from click.testing import CliRunner
from msgspec.structs import fields

from batonmq.broker.main import SECTIONS as BROKER_SECTIONS
from batonmq.launcher.children import Children, rotate_log
from batonmq.launcher.cluster import LocalCluster, gave_up
from batonmq.launcher.cluster_file import cluster_document, write_document
from batonmq.launcher.layout import LastPlan, Layout, LayoutError, config_of, grown, plan
from batonmq.launcher.main import main
from batonmq.launcher.preparation import (
    StartError,
    check_folder,
    folder_owners,
    last_plan,
    lock_folder,
    needed_bytes_of,
    secured,
    settings_of,
    write_configs,
)
from batonmq.namesrv.main import SECTIONS as NAMESRV_SECTIONS
from batonmq.runtime import disk
from batonmq.runtime.authority import Authority
from batonmq.runtime.secret_file import read_passwords
from batonmq.runtime.tls import TlsError
from tests.shared.failing_disk import failing, walk_errors

OVERRIDES = {
    "namesrv": {"scanNotActiveBrokerInterval": 1_000},
    "controller": {"brokerSessionTimeoutMs": 900},
    "broker": {"regionId": "here"},
    "store": {"minInSyncReplicas": 2},
    "ha": {"haSendHeartbeatInterval": 50},
    "replicas": {"masterLeaseMs": 500},
}


def test_overrides_of_every_section_reach_the_processes_that_read_it() -> None:
    """A section that no configuration file took up would be a setting that does nothing."""
    layout = plan(Path("/data"), overrides=OVERRIDES)
    server = config_of(layout, layout.name_servers[0])
    broker = config_of(layout, layout.brokers[0])
    for section, values in OVERRIDES.items():
        files = [config for config in (server, broker) if section in config]
        assert len(files) == 1, section
        assert files[0][section].items() >= values.items()
    assert set(server) | set(broker) == {*OVERRIDES, "metrics"}  # every process has that one


def test_a_section_that_no_process_reads_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"section 'brokers' .* is unknown; allowed are namesrv"):
        plan(Path("/data"), overrides={"brokers": {"regionId": "here"}})


def test_a_full_disk_is_named_with_what_is_left_and_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = SimpleNamespace(free=5 << 20)
    monkeypatch.setattr("batonmq.launcher.preparation.shutil.disk_usage", lambda _: used)
    with pytest.raises(StartError) as raised:
        check_folder(plan(tmp_path / "data"))
    text = str(raised.value)
    assert str(tmp_path / "data") in text
    assert "5 MiB left" in text and "1024 MiB are needed" in text
    assert "\n" not in text


def test_the_controllers_of_a_local_cluster_share_a_password_that_is_made_once(
    tmp_path: Path,
) -> None:
    layout = plan(tmp_path, controllers=3, replicas=1)
    write_configs(layout)
    path = layout.raft_password_file
    made = path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600
    for node in layout.name_servers:
        assert yaml.safe_load(node.config.read_text())["controller"]["raftPasswordFile"] == str(
            path
        )
    write_configs(layout)
    assert path.read_bytes() == made, "a resumed cluster keeps it"


def test_raft_password_is_made_on_request_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    made = CliRunner().invoke(main, ["raftPassword", str(path)])
    assert made.exit_code == 0 and str(path) in made.output
    content = path.read_bytes()
    assert len(content) == 45
    again = CliRunner().invoke(main, ["raftPassword", str(path)])
    assert again.exit_code == 1 and "File exists" in again.output
    assert path.read_bytes() == content
    nowhere = CliRunner().invoke(main, ["raftPassword", str(tmp_path / "no" / "secret")])
    assert nowhere.exit_code == 1 and "No such file" in nowhere.output
    assert CliRunner().invoke(main, ["raftPassword"]).exit_code == 2


def test_small_segments_need_less_disk_space() -> None:
    small = {"store": {"mappedFileSizeCommitLog": 16 << 20}}
    assert needed_bytes_of(plan(Path("/nowhere"))) == 1 << 30
    assert needed_bytes_of(plan(Path("/nowhere"), overrides=small)) == 160 << 20


def test_a_folder_keeps_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --config the next start asked for 1 GiB, and no broker opened its small segments.
    From another folder it looked for other files."""
    assert settings_of(tmp_path, None) == {}
    given = {"controller": {"raftPasswordFile": "secret", "controllerStorePath": "~/n"}}
    (tmp_path / "given.yaml").write_text(yaml.safe_dump(given))
    monkeypatch.chdir(tmp_path)
    write_configs(plan(tmp_path, overrides=settings_of(tmp_path, Path("given.yaml"))))
    monkeypatch.chdir("/")
    kept = {"raftPasswordFile": str(tmp_path / "secret"), "controllerStorePath": "~/n"}
    assert settings_of(tmp_path, None) == {"controller": kept}
    write_configs(plan(tmp_path))
    assert settings_of(tmp_path, None) == {}


def test_a_key_that_is_no_text_is_left_to_the_check_of_settings(tmp_path: Path) -> None:
    """`up` ended with a traceback."""
    path = tmp_path / "given.yaml"
    path.write_text("broker: {1: abc}")
    assert settings_of(tmp_path, path) == {"broker": {1: "abc"}}


@pytest.mark.parametrize(
    ("file", "what"),
    [
        (None, "no server can be started: "),
        ("/tmp/batonmq-check", "no server can be started: /tmp"),
        ("data/a/conf/x", "--data "),
        ("data", "--data "),
    ],
)
async def test_a_start_names_its_folder_only_where_that_is_at_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str | None, what: str
) -> None:
    """A refused fork was said to be of --data."""
    named = [] if file is None else [str(tmp_path / file)]
    failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *named)
    monkeypatch.setattr(
        "batonmq.launcher.preparation.check_settings", AsyncMock(side_effect=failure)
    )
    cluster = LocalCluster(plan(tmp_path / "data" / "a"), Mock(), Mock())
    with pytest.raises(StartError, match=f"^{what}.*No space left"):
        await cluster.start()


async def test_a_start_that_fails_ends_once_the_others_have_a_pid(tmp_path: Path) -> None:
    """The others were still being forked when all that had a pid were ended."""
    layout = plan(tmp_path, replicas=2)
    write_configs(layout)
    first, *others = layout.nodes
    (first.data_dir / "process.log").mkdir()

    async def fork(*_: object) -> Mock:
        for _ in range(5):
            await asyncio.sleep(0)
        return Mock(pid=1 << 30, wait=AsyncMock(side_effect=asyncio.Event().wait))

    children = Children(layout, Mock(start=fork), Mock(), lambda name: False)
    with pytest.raises(IsADirectoryError):
        await children.start_all()
    assert all(children.by_name[node.name].pid for node in others)
    for child in children.by_name.values():
        child.pid = None
    await children.stop_all([])


def test_every_setting_that_names_a_file_is_known_as_one(tmp_path: Path) -> None:
    sections = (NAMESRV_SECTIONS | BROKER_SECTIONS).values()
    keys = {f.encode_name for kind in sections for f in fields(kind) if f.type is str}
    files = {key for key in keys if re.search("(?i)path|file|dir|folder|cert", key)}
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump({"broker": dict.fromkeys(files, "x")}))
    assert len(files) > 10 and "x" not in settings_of(tmp_path, path)["broker"].values()


@pytest.mark.parametrize("error", ["EIO", "ENOSPC"])
def test_whatever_disk_call_of_a_first_start_fails_the_next_one_makes_its_files(
    tmp_path: Path, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An authority with a key and no certificate was refused by each later start."""
    monkeypatch.setattr(disk, "fsync", lambda fd: None)

    def start(rule: str, number: int) -> bool:
        given = {"broker": {"regionId": "here"}}
        layout = plan(
            tmp_path / str(number), controllers=1, replicas=1, overrides=given, secure="enforcing"
        )
        with failing(rule) as struck, suppress(OSError, TlsError):
            write_configs(layout)
        write_configs(layout)
        assert (settings_of(layout.data_dir, None), secured(layout.data_dir)) == (
            given,
            "enforcing",
        )
        assert read_passwords(layout.raft_password_file)
        assert len(Authority(layout.tls_folder).issued()) == 3
        return bool(struck)

    assert walk_errors(f"* * {error}", start) > 40


@pytest.mark.parametrize(
    ("name", "read", "way_out"),
    [
        ("cluster.json", last_plan, "remove it, and give --controllers"),
        ("namesrv-0.yaml", secured, "--secure MODE"),
        ("broker-1.yaml", folder_owners, "/broker-1/brokerIdentity"),
        ("settings.yaml", partial(settings_of, config=None), "--config"),
    ],
)
def test_what_a_folder_keeps_is_not_passed_over_where_it_cannot_be_read(
    tmp_path: Path, name: str, read: Callable[[Path], object], way_out: str
) -> None:
    """Five replicas became three, a store would get another group, and TLS was off."""
    layout = plan(tmp_path, replicas=5, secure="permissive")
    assert read(tmp_path) in (LastPlan(), "disabled", {}), "a new folder"
    write_configs(layout)
    pids = dict.fromkeys(node.name for node in layout.nodes)
    write_document(layout.planned_cluster_file, cluster_document(layout, 0, pids, {}))
    found, path = read(tmp_path), tmp_path / "conf" / name
    for rule in (f"* {name} EIO", f"* {name} EACCES"):
        with failing(rule), pytest.raises(OSError, match=str(path)):
            read(tmp_path)
    assert read(tmp_path) == found
    # "": by a power loss, of an earlier version. A file of --config may be empty.
    for damaged in ("[", "[]", *([] if name == "settings.yaml" else [""])):
        path.write_text(damaged)
        with pytest.raises(LayoutError, match=f"{path}.*; .*{way_out}"):
            read(tmp_path)


def test_a_missing_file_of_a_cluster_with_tls_does_not_turn_tls_off(tmp_path: Path) -> None:
    layout = plan(tmp_path, secure="enforcing")
    write_configs(layout)
    (tmp_path / "conf" / "namesrv-0.yaml").unlink()
    with pytest.raises(LayoutError, match=r"namesrv-0\.yaml is missing.*--secure MODE"):
        secured(tmp_path)


def test_r47_a_broker_folder_stays_with_its_group(tmp_path: Path) -> None:
    """Grown to five replicas, shrunk to three, a group added, each group grown: no folder, and no
    address, goes from one group to another."""
    made = []

    def numbers(**wanted: int) -> list[tuple[str, int]]:
        layout = plan(tmp_path, owners=folder_owners(tmp_path), **wanted)
        write_configs(layout)
        made.extend((node.index, node.group, node.port) for node in layout.brokers)
        return [(node.group[-1], node.index) for node in layout.brokers]

    assert numbers(replicas=5) == [("a", n) for n in range(5)]
    assert numbers(replicas=3) == [("a", 0), ("a", 1), ("a", 2)]
    two = numbers(replicas=3, groups=2)
    assert two == [("a", 0), ("a", 1), ("a", 2), ("b", 5), ("b", 6), ("b", 7)]
    assert numbers(replicas=4, groups=2)[3:5] == [("a", 3), ("b", 5)]
    assert numbers(replicas=4, groups=2)[-1] == ("b", 8)
    owner_of = {(index, port): group for index, group, port in made}
    assert len(owner_of) == len(set(made)), "each number and port has one group"


def test_a_store_is_moved_aside_by_a_command_while_its_broker_is_stopped(tmp_path: Path) -> None:
    store = tmp_path / "broker-3"
    (store / "commitlog").mkdir(parents=True)
    hold = (
        "import sys; from pathlib import Path; from batonmq.runtime.lock_file import FolderLock;"
        f"FolderLock(Path({str(store / 'lock')!r})).acquire(); print(flush=True); input()"
    )
    command = [sys.executable, "-c", hold]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as broker:
        assert broker.stdin is not None and broker.stdout is not None
        broker.stdout.readline()
        refused = CliRunner().invoke(main, ["moveAside", str(store)])
        assert refused.exit_code == 1 and f"in use by process {broker.pid}" in refused.output
        broker.stdin.write(b"\n")
    moved = CliRunner().invoke(main, ["moveAside", str(store)])
    assert moved.exit_code == 0, moved.output
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("broker-3.aside-") and (aside / "commitlog").is_dir()
    assert CliRunner().invoke(main, ["moveAside", str(aside / "commitlog")]).exit_code == 2


def test_a_mount_point_is_not_moved_aside_and_it_is_said_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    monkeypatch.setattr(Path, "rename", busy)
    refused = CliRunner().invoke(main, ["moveAside", str(tmp_path / "store")])
    assert refused.exit_code == 1
    assert "it is a mount point: mount the new disk in its place" in refused.stderr


def test_a_folder_is_run_by_one_supervisor_at_a_time(tmp_path: Path) -> None:
    layout = plan(tmp_path)
    first = lock_folder(layout)
    with pytest.raises(StartError, match=rf"run from this folder already \(pid {os.getpid()}\)"):
        lock_folder(layout)
    first.release()
    lock_folder(layout).release()


def test_without_all_brokers_or_all_name_servers_a_cluster_never_becomes_whole() -> None:
    layout = plan(Path("/nowhere"), replicas=2)
    brokers, servers = {"broker-a-0", "broker-a-1"}, {"namesrv-0", "namesrv-1", "namesrv-2"}
    assert gave_up(layout, set(), was_whole=False) == ""
    assert gave_up(layout, {"broker-a-0", "namesrv-1"}, was_whole=False) == ""
    assert "all brokers" in gave_up(layout, brokers, was_whole=False)
    assert "all name servers" in gave_up(layout, servers, was_whole=False)
    assert gave_up(layout, brokers, was_whole=True) == "", "it lives on: they may come back"
    assert "all processes" in gave_up(layout, brokers | servers, was_whole=True)


def test_a_log_is_rotated_while_its_process_appends(tmp_path: Path) -> None:
    path = tmp_path / "process.log"
    rotate_log(path, 10)  # not there yet
    with path.open("a") as writes:
        for number in range(5):
            writes.write(f"line {number} of it\n")
            writes.flush()
            rotate_log(path, 10, kept=3)
            assert path.read_text() == ""
        writes.write("short\n")
        writes.flush()
        rotate_log(path, 10, kept=3)
    assert path.read_text() == "short\n"  # appended at the new end: no hole
    kept = [(tmp_path / f"process.log.{n}").read_text() for n in (1, 2, 3)]
    assert kept == [f"line {n} of it\n" for n in (4, 3, 2)]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("fails", ["copy", "truncate"])
def test_a_full_disk_pushes_no_older_log_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A rotation that fails is tried again each time, and leaves all logs as they are. A log that
    only grows (`chattr +a`) cannot be emptied."""
    path = tmp_path / "process.log"
    files = {"process.log": "the long newest one", "process.log.1": "b", "process.log.2": "a"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    def copy_part(source: Path, target: Path | str) -> None:
        Path(target).write_bytes(source.read_bytes()[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    only_grows = Mock(side_effect=OSError(errno.EPERM, os.strerror(errno.EPERM)))
    owner, name, failure = {
        "copy": (shutil, "copyfile", copy_part),
        "truncate": (os, "truncate", only_grows),
    }[fails]
    monkeypatch.setattr(owner, name, failure)
    for _ in range(3):
        with pytest.raises(OSError, match=r"No space left|not permitted"):
            rotate_log(path, 10, kept=2)
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == files


@pytest.mark.parametrize("refused", ["process.log.0", "process.log.2"])
def test_a_rotation_that_ends_half_way_keeps_every_line_and_is_ended_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The only copy of the newest lines had a name that the next rotation overwrote."""
    path = tmp_path / "process.log"
    for number in range(1, 4):
        (tmp_path / f"process.log.{number}").write_text(f"older {number};")
    path.write_text("the newest lines")
    replace = disk.replace

    def refuse(source: str, target: str) -> None:
        if Path(source).name == refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "replace", refuse)
        for _ in range(3):
            with pytest.raises(OSError, match="Input/output"):
                rotate_log(path, 10, kept=4)
            path.write_text("what came later")
    rotate_log(path, 10, kept=4)
    kept = [(tmp_path / f"process.log.{n}").read_text() for n in (1, 2, 3, 4)]
    assert kept == ["the newest lines", "older 1;", "older 2;", "older 3;"]
    assert path.read_text() == "what came later" and len(list(tmp_path.iterdir())) == 5


def _numbers(layout: Layout) -> list[tuple[int, str]]:
    return [(node.index, node.group) for node in layout.brokers]


def test_r47_a_cluster_that_grows_keeps_the_number_of_each_folder() -> None:
    """A replica more stands with its group; it takes a folder of its group first, then a new
    number. A new group takes no name that a folder has. An unknown group is refused by name."""
    layout = plan(Path("/data"), replicas=2, groups=2)
    layout, node = grown(layout, "broker-a")
    assert (node.index, node.group, node.port) == (4, "broker-a", 9876 + 1035 + 400)
    assert [group for _, group in _numbers(layout)] == ["broker-a"] * 3 + ["broker-b"] * 2
    owners = {5: "broker-b", 6: "broker-c"}
    assert _numbers(grown(layout, "broker-b", owners)[0])[-1] == (5, "broker-b")
    assert grown(layout, "broker-a", owners)[1].index == 7
    assert (grown(layout, "", owners)[1].group, grown(layout, "")[1].group) == (
        "broker-d",
        "broker-c",
    )
    assert grown(layout, "broker-c", owners)[1].index == 6
    with pytest.raises(LayoutError, match=r"no group 'broker-x'; there is broker-a, broker-b"):
        grown(layout, "broker-x")
    with pytest.raises(LayoutError, match="26 brokers are the most"):
        grown(plan(Path("/data"), replicas=26), "broker-a")
    with pytest.raises(LayoutError, match="--base-port is 62000"):
        grown(plan(Path("/data"), replicas=25, base_port=62000), "broker-a")


def test_a_folder_keeps_size_settings_and_tls_of_its_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `batonmq up` does not name is as at the last start."""
    given = {"broker": {"regionId": "here"}}
    layout = plan(
        tmp_path,
        controllers=1,
        replicas=1,
        groups=2,
        base_port=20_000,
        overrides=given,
        secure="permissive",
    )
    layout, _ = grown(layout, "broker-b")
    write_configs(layout)
    pids = dict.fromkeys(node.name for node in layout.nodes)
    write_document(layout.planned_cluster_file, cluster_document(layout, 0, pids, {}))
    run_up = AsyncMock(return_value=0)
    monkeypatch.setattr("batonmq.launcher.up.run_up", run_up)
    assert CliRunner().invoke(main, ["up", "--data", str(tmp_path)]).exit_code == 0
    assert run_up.call_args.args[0] == layout
    last = last_plan(tmp_path)
    owners = dict(_numbers(layout))
    larger = plan(tmp_path, replicas=3, last=last, owners=owners)
    assert [group for _, group in _numbers(larger)] == ["broker-a"] * 3 + ["broker-b"] * 3
    assert len(plan(tmp_path, groups=3, last=last, owners=owners).brokers) == 6
    layout.planned_cluster_file.write_text('{"nameServers": [], "brokers": [{}]}')
    with pytest.raises(LayoutError, match="no plan of a cluster; remove it"):
        last_plan(tmp_path)
    assert _numbers(plan(tmp_path, last=LastPlan())) == [(n, "broker-a") for n in range(3)]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("--replicas 0", "--replicas 0"),
        ("--controllers 2", "--controllers is 2"),
        ("--base-port 80", "--base-port is 80"),
        ("--watchdog 0.1", "--watchdog is 0.1"),
        ("--config nowhere", "nowhere"),
        ("--nothing", "--nothing"),
    ],
)
def test_wrong_usage_is_exit_2_and_an_event_for_a_reader_of_events(
    tmp_path: Path, wrong: str, named: str
) -> None:
    words = ["up", "--json", "--data", str(tmp_path / "data"), *wrong.split()]
    ran = CliRunner().invoke(main, words)
    assert ran.exit_code == 2
    (event,) = map(json.loads, ran.stdout.splitlines())
    assert (event["event"], event["exitCode"]) == ("failed", 2)
    assert named in event["error"] and event["error"] in ran.stderr
