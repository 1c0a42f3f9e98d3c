"""The property string against a naive reader."""

from hypothesis import given
from hypothesis import strategies as st

from batonmq.protocol.properties import (
    decode_properties,
    encode_properties,
    find_property,
    name_value_problem,
    with_properties,
)

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=8)
# A string of few letters and both separators: repeats, empties and prefixes come by themselves.
RAW = st.text("ab\x01\x02", max_size=24)


def naive(raw: str) -> dict[str, str]:
    """Java `string2messageProperties`, character by character."""
    result: dict[str, str] = {}
    pair = ""
    for char in raw + "\x02":
        if char != "\x02":
            pair += char
            continue
        at = pair.find("\x01")
        if at > 0 and at < len(pair) - 1:
            result[pair[:at]] = pair[at + 1 :]
        pair = ""
    return result


@given(st.dictionaries(TEXT, TEXT, max_size=6))
def test_what_is_written_is_read_again(properties: dict[str, str]) -> None:
    raw = encode_properties(properties)
    assert decode_properties(raw) == properties
    assert decode_properties(raw.encode()) == properties
    assert decode_properties(raw[:-1]) == properties, "a missing last separator is accepted"
    for name, value in properties.items():
        assert find_property(raw.encode(), name.encode()) == value.encode()
        assert name_value_problem(name, value) is None


@given(RAW)
def test_reading_agrees_with_java(raw: str) -> None:
    want = naive(raw)
    assert decode_properties(raw) == want
    for key in ("a", "b", "aa", "ab", "ba", "bb"):
        found = find_property(raw.encode(), key.encode())
        assert (None if found is None else found.decode()) == want.get(key)


def test_a_repeated_key_counts_last() -> None:
    assert decode_properties("K\x01one\x02K\x01two\x02") == {"K": "two"}


def test_separators_and_nothing_are_named() -> None:
    assert "separator" in (name_value_problem("a\x01", "b") or "")
    assert "value" in (name_value_problem("a", "") or "")


@given(RAW, st.dictionaries(st.sampled_from(["a", "b", "ab"]), TEXT, max_size=3))
def test_pairs_that_are_set_stand_once_and_the_others_stay(
    raw: str, values: dict[str, str]
) -> None:
    pairs = {name.encode(): value.encode() for name, value in values.items()}
    changed = with_properties(raw.encode(), pairs)
    assert naive(changed.decode()) == naive(raw) | values
    for name, value in pairs.items():
        assert (b"\x02" + changed).count(b"\x02" + name + b"\x01") == 1
        assert changed.endswith(b"\x02") and name + b"\x01" + value + b"\x02" in changed
