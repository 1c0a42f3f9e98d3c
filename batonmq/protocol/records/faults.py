"""What can be wrong with the bytes of a record: each fault once, with its text."""

from enum import Enum


class RecordFault(Enum):
    """The value is the text; `text` fills in the numbers."""

    # Of any bytes.
    CUT_OFF = "a record that is cut off"
    ZEROS = "zeros where a record should begin"
    MAGIC = "magic {magic:08x} is not one of a record"
    BLANK_SIZE = "blank of {size} bytes"
    BLANK = "a blank where a message was expected"
    SIZE_TOO_SMALL = "size {size} is below the smallest record"
    SIZE_OF_HOSTS = "size {size} is below the smallest record with such hosts"
    SIZE_TOO_LARGE = "size {size} is no size of a record"
    BODY_LENGTH = "body length {length} does not fit into size {size}"
    TOPIC_LENGTH = "topic length {length} does not fit into size {size}"
    PARTS = "parts sum up to {parts} bytes, size says {size}"
    PROPERTY_CRC = "property CRC is wrong"
    PROPERTY_CRC_NAME = "the name of the property CRC is damaged"
    BODY_CRC = "body CRC is wrong"
    # Of bytes at their place in a file of the log.
    MISPLACED = "a record that says it belongs at {offset}"
    LEAVES_FILE = "a record that leaves its file"
    NO_SPACE_BEHIND = "a record that leaves no space for the end of its file"
    BLANK_WITHIN_FILE = "a blank of {size} bytes that does not end its file"
    TORN_PROPERTIES = "properties that were never written to their end"
    # Where the last bytes of the log do not reach to the end of a record.
    SIZE_WRONG = "a record with a wrong length"
    NOT_WHOLE = "no whole record is there"

    def text(self, **numbers: int) -> str:
        return self.value.format(**numbers)


class CorruptRecord(Exception):
    """These bytes are no whole record. `what`: the reason; the caller adds file and offset."""

    def __init__(self, fault: RecordFault, **numbers: int) -> None:
        self.fault = fault
        self.what = fault.text(**numbers)
        super().__init__(self.what)
