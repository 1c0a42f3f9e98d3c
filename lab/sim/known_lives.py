"""Lives in which a promise was broken once, or a checker was wrong. `python -m lab.sim --known`
lives them again, beside its seeds. The mistakes have tests of their own, too: with each change of
the code a seed becomes another life."""

from __future__ import annotations

from typing import Final

KNOWN: Final[dict[int, str]] = {
    10117: "R27, a slave refused a log whose unclean election had expired",
    20168: "transactions, brokers knew no producer that had not sent yet",
    20642: "sim, a clock was 300 s ahead when the faults were over",
    21255: "R39, a deletion expired before its offsets were stored",
    20348: "checker, hours passed before what was stored was confirmed",
    20629: "checker, the same under a clock that leaps by hours",
    30180: "R25, epochs went before the files of their bytes; the lead to and fro",
    30487: "R23, an unclean winner died before it opened",
    31603: "R17, a suspect master led on when others had joined",
    34838: "R17, a master led on that could not read what it had to pop",
    31621: "checker, a deposed master let expire what was given up",
    30175: "checker, a second unclean election took an offset back",
    33163: "checker, a lease was renewed after a stall, and lost again",
    34734: "checker, an unclean winner confirmed its tail before it opened",
    20312: "checker, one of two copies of a message had expired",
    33710: "checker, the later of two delayed copies was due first",
    34560: "checker, a deposed master still showed what was given up",
    34981: "checker, what was given up was sent again to its place",
    37549: "R30, a half was checked before the op of its second try counted",
    43466: "G8, a start that cut queues below the checkpoint was killed",
    38172: "R38, positions were stated in a record that arrives at no queue",
    37122: "checker, what a broker wrote is as old as its end",
    41179: "R39, a new master gave messages of a topic that was deleted",
    46931: "R27, a master that had handed over let segments expire",
    47714: "R2, a slave acked to its master in an epoch that it did not know",
    48878: "checker, all who knew the newest epoch had ended",
    41017: "R45, a segment that found no room was not wanted any more",
    40291: "R27, killed between the end of one log and the begin of the next",
    37465: "R40, a store that gave up was asked to write in the same turn",
    44289: "R33, who was elected by a switch had ended meanwhile",
    39730: "R8, elected after a stall it takes writes without a lease",
    43196: "R12, a master that is cut off does not know of a restart",
    37705: "R30, the same, three such ops in one record",
    41829: "checker, a recall was over before a copy of another clock was due",
    36623: "R30, a recall was over on a full disk, and no progress said so",
    40598: "R30, a master named again did not know what it had delivered",
    60099: "checker, a master ended that had just confirmed a topic",
    172: "checker, a turn on a slow disk began before a timer was due",
    61456: "R24, a group took up no queue whose first message was bad",
    30130: "R24, a slave found its bad record once more, and stayed suspect",
    62040: "R6, a process that was removed and came back was deposed at once",
    61867: "checker, a master elected again has unsynced bytes of its own turn",
    62031: "checker, a process that hangs has not accepted a connection",
    62918: "R32, name servers that came back from a power loss had no routes for 30 s",
}
