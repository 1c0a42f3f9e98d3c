"""The durable replacement of small files, under the name by which the store's users know it.

The code lives in `epoch.durable_file`, because the epoch file needs it too and `epoch` stands
below `store`.
"""

from epoch.durable_file import (
    Loaded,
    UnreadableFileError,
    backup_path,
    load_with_backup,
    remove_file,
    replace_file,
    replace_with_twin,
    sync_directory,
    sync_file,
    write_all,
    zero_range,
)

__all__ = [
    "Loaded",
    "UnreadableFileError",
    "backup_path",
    "load_with_backup",
    "remove_file",
    "replace_file",
    "replace_with_twin",
    "sync_directory",
    "sync_file",
    "write_all",
    "zero_range",
]
