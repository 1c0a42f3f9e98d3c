"""Property strings of sends: found, completed, refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq.broker.write.put_hooks import SendProperties
from batonmq.protocol.message_id import UniqIdGenerator, host_bytes
from batonmq.protocol.properties import decode_properties, encode_properties
from batonmq.protocol.tags import java_string_hash

IDS = UniqIdGenerator(host_bytes("127.0.0.1", 10911)[:-4], 1, lambda: 1_700_000_000_000)
PREPARE = SendProperties("DefaultCluster", "DefaultRegion", IDS).prepare


def test_what_the_store_needs_is_found_and_what_records_carry_is_added():
    raw, tags, keys, unique = PREPARE("KEYS\x01a b\x02UNIQ_KEY\x01U1\x02TAGS\x01TagA")
    assert (tags, keys, unique) == (java_string_hash("TagA"), b"a b", b"U1")
    assert decode_properties(raw) == {
        "KEYS": "a b",
        "UNIQ_KEY": "U1",
        "TAGS": "TagA",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
        "CLUSTER": "DefaultCluster",
    }


def test_a_key_inside_a_value_is_no_key():
    _, tags, keys, _ = PREPARE("note\x01TAGS\x02XKEYS\x01v\x02UNIQ_KEY\x01U\x02")
    assert (tags, keys) == (0, None)


def test_a_missing_unique_key_is_made():
    raw, _, _, unique = PREPARE("")
    assert len(unique) == 32 and decode_properties(raw)["UNIQ_KEY"] == unique.decode()


def test_one_that_would_break_the_reply_is_replaced():
    raw, _, _, unique = PREPARE('UNIQ_KEY\x01a"b\x02')
    assert b'"' not in unique and b'a"b' not in raw


@pytest.mark.parametrize("text", ["DELAY\x010\x02", "TRAN_MSG\x01false\x02", "POP_CK\x01x\x02"])
def test_what_only_looks_like_it_is_taken(text):
    raw, _, _, _ = PREPARE("UNIQ_KEY\x01U\x02" + text)
    assert b"POP_CK" not in raw


def test_wait_false_lifts_nothing_r29():
    """R29: the property is stored as it came; nothing in the broker reads it to skip a wait."""
    raw, _, _, _ = PREPARE("UNIQ_KEY\x01U\x02WAIT\x01false\x02")
    assert decode_properties(raw)["WAIT"] == "false"


plain = st.text(
    st.characters(blacklist_characters="\x01\x02", blacklist_categories=["Cs"]), min_size=1
)


@given(st.dictionaries(plain, plain, max_size=6))
def test_user_properties_survive(properties):
    ours = ("DELAY", "TRAN_MSG", "CLUSTER", "MSG_REGION", "TRACE_ON", "POP_CK", "__CRC32#")
    for key in ours:
        properties.pop(key, None)
    properties["UNIQ_KEY"] = "U"
    raw, _, _, _ = PREPARE(encode_properties(properties))
    assert properties.items() <= decode_properties(raw).items()
