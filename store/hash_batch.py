"""Java's string hash of many pieces of one buffer at once, with numpy.

The hash of `chars[b:e]` is the sum of `chars[k] * 31 ** (e - 1 - k)`, modulo 2 ** 32. 31 has an
inverse there, so one running sum of `chars[k] * 31 ** -k` gives every piece by a difference,
whatever their lengths are. `protocol.tags.java_string_hash` is the same for one text.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

from batonmq.protocol.tags import java_string_hash

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]
Chars = npt.NDArray[np.uint8]

_MODULUS: Final = 1 << 32


class _Powers:
    """`base ** 0`, `base ** 1`, ... modulo 2 ** 32, as many as were ever asked for."""

    def __init__(self, base: int) -> None:
        self._base = np.uint32(base)
        self._known: U32 = np.ones(1, dtype=np.uint32)

    def up_to(self, count: int) -> U32:
        if count > len(self._known):
            steps = np.full(2 * count, self._base, dtype=np.uint32)
            steps[0] = 1
            self._known = np.cumprod(steps, dtype=np.uint32)
        return self._known[:count]


_powers: Final = _Powers(31)
_inverse_powers: Final = _Powers(pow(31, -1, _MODULUS))


def powers_of_31(exponents: I64) -> U32:
    """`31 ** n` modulo 2 ** 32 for each."""
    count = int(exponents.max(initial=0)) + 1
    return _powers.up_to(count)[exponents]


class PieceHashes:
    """The hashes of pieces of `chars`, UTF-8 bytes."""

    def __init__(self, chars: Chars) -> None:
        self._chars = chars
        self._sums: U32 = np.zeros(len(chars) + 1, dtype=np.uint32)
        np.cumsum(chars * _inverse_powers.up_to(len(chars)), dtype=np.uint32, out=self._sums[1:])
        self._not_ascii = np.flatnonzero(chars > 127)

    def of(self, begins: I64, ends: I64) -> U32:
        """Modulo 2 ** 32, in order; 0 for an empty piece. Wrong where `are_odd`."""
        sums = self._sums
        return (sums[ends] - sums[begins]) * powers_of_31(np.maximum(ends - 1, 0))

    def are_odd(self, begins: I64, ends: I64) -> npt.NDArray[np.bool_]:
        """Which pieces have other characters than ASCII: Java hashes UTF-16 units."""
        high = self._not_ascii
        if not len(high):
            return np.zeros(len(begins), dtype=np.bool_)
        odd: npt.NDArray[np.bool_] = np.searchsorted(high, begins) != np.searchsorted(high, ends)
        return odd

    def behind(self, prefixes: U32, begins: I64, ends: I64) -> U32:
        """The hashes of texts that begin with one of hash `prefixes` each, and go on with a piece
        of any characters."""
        result = prefixes * powers_of_31(ends - begins) + self.of(begins, ends)
        for row in np.flatnonzero(self.are_odd(begins, ends)).tolist():
            piece = self._chars[int(begins[row]) : int(ends[row])].tobytes()
            result[row] = _hash_behind(int(prefixes[row]), piece)
        return result


def _hash_behind(prefix: int, piece: bytes) -> int:
    text = piece.decode("utf-8", "replace")
    units = len(text.encode("utf-16-be", "surrogatepass")) // 2
    return (prefix * pow(31, units, _MODULUS) + java_string_hash(text)) % _MODULUS
