"""The disk: text and records in the user's cache folder, and files that a person names.

In: keys and JSON. Out: the records of other processes, if the folder can be trusted. Knows: the knobs.
"""

from transconv.disk_cache import records, seals
from transconv.disk_cache.files import (
    leave_text,
    read_named,
    replace_data,
    replace_named,
    why_foreign,
    why_untrusted,
    why_unwritable,
)
from transconv.disk_cache.memory_cache import Cache, forget_all
from transconv.disk_cache.records import Content, Drawer

__all__ = ["Cache", "Content", "Drawer", "forget_all", "leave_text", "read_named", "records",
           "replace_data", "replace_named", "seals", "why_foreign", "why_untrusted", "why_unwritable"]
