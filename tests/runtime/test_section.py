"""Sections of configuration files: each range is kept, each key without effect is listed."""

import logging
import re
from pathlib import Path

import pytest

from batonmq.broker.config import BrokerConfig, ReplicasConfig
from batonmq.controller.config import ControllerConfig
from batonmq.ha.config import HAConfig
from batonmq.namesrv.config import NamesrvConfig
from batonmq.runtime.metrics import MetricsConfig
from batonmq.runtime.section import Section, keys_of
from batonmq.runtime.settings import load_settings
from batonmq.store.config import StoreConfig

ROOT = Path(__file__).parents[2]
SECTIONS = [
    BrokerConfig,
    ReplicasConfig,
    StoreConfig,
    HAConfig,
    ControllerConfig,
    NamesrvConfig,
    MetricsConfig,
]
RANGES = [(kind, name) for kind in SECTIONS for name in kind.RANGES]


@pytest.mark.parametrize(("kind", "name"), RANGES)
def test_a_number_out_of_its_range_is_refused_by_its_key(kind: type[Section], name: str) -> None:
    least, most = kind.RANGES[name]
    key = keys_of(kind)[name]
    for value in (least - 1, *([] if most is None else [most + 1])):
        with pytest.raises(ValueError, match=f"^{key} is {value}: {least} .*allowed$"):
            kind(**{name: value})


@pytest.mark.parametrize("kind", SECTIONS)
def test_what_nothing_reads_is_listed_as_without_effect(kind: type[Section]) -> None:
    code = "\n".join(
        path.read_text() for path in (ROOT / "batonmq").glob("*/**/*.py") if "_pb2" not in path.name
    )
    read = set(re.findall(r"\.(\w+)|getattr\(section, \"(\w+)\"", code))
    read = {name for pair in read for name in pair}
    assert {name for name in kind.__struct_fields__ if name not in read} == kind.WITHOUT_EFFECT


def test_a_file_that_sets_a_key_without_effect_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "b.yaml"
    file.write_text("store:\n  syncFlushTimeout: 9\n  slaveTimeout: 2000\n")
    with caplog.at_level(logging.WARNING):
        load_settings(file, {"store": StoreConfig}, environ={})
    assert caplog.messages == [f"setting_without_effect key=syncFlushTimeout where={file}:2"]
