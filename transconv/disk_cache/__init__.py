"""The disk: text and records in the user's cache folder, and files that a person names.

In: keys and JSON. Out: the records of other processes, if the folder can be trusted. Knows: the knobs.
"""

from transconv.disk_cache import fields, seals
from transconv.disk_cache.files import leave_text, replace_data, why_foreign, why_untrusted
from transconv.disk_cache.named import read_named, replace_named, why_unwritable
from transconv.disk_cache.records import Content, Drawer

__all__ = ["Content", "Drawer", "fields", "leave_text", "read_named", "replace_data", "replace_named",
           "seals", "why_foreign", "why_untrusted", "why_unwritable"]
