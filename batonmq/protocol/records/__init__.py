"""Defines a valid record of the commit log, for store, clients and Spark. `codec` is the reference:
it writes and reads one record, and says why bytes are invalid. `faults` lists the reasons. `common`
reads the usual record fast, `columns` many at once with numpy, `search` finds records if no
boundary is known. All agree with `codec`. Only `columns` imports numpy."""
