"""The disk cache: text and records in the user's cache folder.

In: keys and JSON. Out: what another process kept, if the folder can be trusted. Knows: the knobs.
"""

from transconv.disk_cache.records import Content, Drawer

__all__ = ["Content", "Drawer"]
