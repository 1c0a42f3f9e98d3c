"""Seeds whose lives once broke a promise, or showed a wrong checker; `python -m lab.sim --known`
runs them as well. Each mistake also has its own test: after a change of the code a seed is another
life, but with the same settings and faults. So only those stay here whose lives have two of these
together that no other life of `make test` has."""

from typing import Final

KNOWN: Final[dict[int, str]] = {
    20642: "sim, a clock was 300 s ahead when the faults were over",
    20348: "checker, hours passed before what was stored was confirmed",
    31603: "R17, a suspect master led on when others had joined",
    34838: "R17, a master led on that could not read what it had to pop",
    33163: "checker, a lease was renewed after a stall, and lost again",
    20312: "checker, one of two copies of a message had expired",
    34981: "checker, what was given up was sent again to its place",
    37549: "R30, a half was checked before the op of its second try counted",
    38172: "R38, positions were stated in a record that arrives at no queue",
    46931: "R27, a master that had handed over let segments expire",
    47714: "R2, a slave acked to its master in an epoch that it did not know",
    48878: "checker, all who knew the newest epoch had ended",
    40291: "R27, killed between the end of one log and the begin of the next",
    37465: "R40, a store that gave up was asked to write in the same turn",
    40598: "R30, a master named again did not know what it had delivered",
    172: "checker, a turn on a slow disk began before a timer was due",
    61456: "R24, a group took up no queue whose first message was bad",
    30130: "R24, a slave found its bad record once more, and stayed suspect",
    62040: "R6, a process that was removed and came back was deposed at once",
    62031: "checker, a process that hangs has not accepted a connection",
    62964: "R39, a deletion was taken over twice, and its topic could not be made again",
}
