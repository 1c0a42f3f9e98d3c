"""The layouts of the store's files, against what RocketMQ 5.3.3 writes."""

import numpy as np
import pytest

from batonmq.protocol import layout
from batonmq.protocol.layout import RecordLayout

LAYOUTS = {name: value for name, value in vars(layout).items() if isinstance(value, RecordLayout)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_struct_and_dtype_agree(name: str) -> None:
    fields = LAYOUTS[name]
    dtype = np.dtype(fields.dtype)
    assert dtype.itemsize == fields.size == fields.struct.size
    assert {field: dtype.fields[field][1] for field in dtype.names} == fields.at


def test_the_formats() -> None:
    assert layout.RECORD_V4.struct.format == ">IIIiiqqiq8sq8siqi"
    assert layout.record_layout(20, 8).struct.format == ">IIIiiqqiq20sq8siqi"
    assert layout.UNIT.struct.format == ">qiq"
    assert layout.INDEX_HEADER.struct.format == ">qqqqii"
    assert layout.INDEX_ENTRY.struct.format == ">iqii"
    assert layout.CHECKPOINT.struct.format == ">qqqqq"
    assert layout.CHECKPOINT_OURS.struct.format == ">8sqI"
    assert layout.CHECKPOINT_ENDS.struct.format == ">qqI"
    assert layout.CHECKPOINT_LOG.struct.format == ">qqII"


def test_the_places_in_a_record() -> None:
    at = layout.RECORD_V4.at
    assert (at["physical_offset"], at["sys_flag"], at["born_host"]) == (28, 36, 48)
    assert (at["store_ms"], at["reconsume_times"], at["body_length"]) == (56, 72, 84)


def test_some_fields_only() -> None:
    some = layout.RECORD_V4.only("size", "magic", "physical_offset")
    assert some.format == ">II20xq"
    assert layout.INDEX_ENTRY.only("offset").format == ">4xq"
    with pytest.raises(AssertionError):
        layout.UNIT.only("size", "offset")
