"""Colours that colour-blind people can distinguish, on white and on black (after Okabe and Ito).

What a colour means, a symbol, a position or a word means, too. Free of Spark.
"""

from typing import Final

_BLUE: Final = "#0b7fc2"
_SKY: Final = "#63bdf0"
_GREEN: Final = "#0a9a72"
_ORANGE: Final = "#e69f00"
_PINK: Final = "#cc79a7"
_VIOLET: Final = "#7a6fd0"
_OLIVE: Final = "#a5a33a"
_BROWN: Final = "#9c6b4a"
GREY: Final = "#8a94a0"
RED: Final = "#d4213d"

#: For brokers, topics, groups: what has no order and no meaning of its own. No red among them.
SERIES: Final = (_BLUE, _ORANGE, _GREEN, _PINK, _SKY, _VIOLET, _OLIVE, _BROWN)

#: Kinds of elections: label, colour, symbol on the time line.
KINDS: Final[dict[str, tuple[str, str, str]]] = {
    "failover": ("failover", RED, "triangle-down"),
    "unclean_election": ("unclean election", "#5b0f4d", "x"),
    "planned_switch": ("planned switch", _BLUE, "diamond"),
    "operator_election": ("election by an operator", _ORANGE, "square"),
    "first_election": ("first election", GREY, "circle"),
}
#: Parts of a failover, in their order: column, label, colour.
PARTS: Final = (
    ("detect_ms", "detect", _ORANGE),
    ("elect_ms", "elect", _SKY),
    ("role_ms", "change role", _GREEN),
    ("open_ms", "open for writes", _PINK),
    ("first_ack_ms", "first acknowledgement", _BLUE),
)
#: From little to much; the lightness falls all along.
HEAT: Final = ((0.0, "#fbe08a"), (0.35, "#f4a23a"), (0.7, "#d9472b"), (1.0, "#8c1226"))
#: A day, an hour with data and without anything to show.
NOTHING: Final = "#b7cfd9"


def series_colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def kind_label(kind: str | None) -> str:
    if kind is None:
        return "unknown"
    return KINDS[kind][0] if kind in KINDS else kind.replace("_", " ")


def kind_colour(kind: str) -> str:
    return KINDS[kind][1] if kind in KINDS else GREY
