"""Where a store is kept."""

from pathlib import Path

import pytest

from batonmq.protocol.errors import ConfigError
from batonmq.runtime.settings import load_settings
from batonmq.store.config import StoreConfig


def read(folder: Path, text: str) -> StoreConfig:
    file = folder / "broker.conf"
    file.write_text(text)
    config = load_settings(file, {"store": StoreConfig}, environ={})["store"]
    assert isinstance(config, StoreConfig)
    return config


def test_a_store_is_in_the_home_unless_the_file_says_where(tmp_path, monkeypatch):
    """As RocketMQ has it; the commit log follows the root, unless it has a path of its own."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    default = read(tmp_path, "haListenPort=10912\n")
    assert default.root == tmp_path / "home" / "store"
    assert default.commit_log_folder == tmp_path / "home" / "store" / "commitlog"
    assert not (tmp_path / "home").exists(), "reading settings makes no folder"
    named = read(tmp_path, "storePathRootDir=/data/a\n")
    assert (named.root, named.commit_log_folder) == (Path("/data/a"), Path("/data/a/commitlog"))
    apart = read(tmp_path, "storePathRootDir=/data/a\nstorePathCommitLog=/fast/log\n")
    assert apart.commit_log_folder == Path("/fast/log")


def test_an_empty_root_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"storePathRootDir.*is empty"):
        read(tmp_path, "storePathRootDir=\n")
