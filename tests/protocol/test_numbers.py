"""Numbers in texts: digits of one script only, and no more than the field can have."""

import pytest

from batonmq.ha.config import HAConfig
from batonmq.protocol.numbers import host_and_port, natural_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("24", None), ("+1", None), ("-1", None), ("²", None), ("", None)],
)
def test_a_natural_number_has_digits_only(text: str, number: int | None) -> None:
    assert natural_number(text, 23) == number


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h:1", ("h", 1)),
        ("[::1]:65535", ("[::1]", 65535)),
        ("h:65536", None),
        ("h:0", None),
        (":1", None),
        ("h", None),
        ("h:²", None),
        ("h:" + "9" * 5_000, None),
    ],
)
def test_an_address_has_a_host_and_a_port(text: str, found: tuple[str, int] | None) -> None:
    assert host_and_port(text) == found
    if found is None:
        with pytest.raises(ValueError, match="haMasterAddress"):
            HAConfig(ha_master_address=text)
