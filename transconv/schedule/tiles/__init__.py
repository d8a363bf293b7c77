"""Tiles of a schedule: boxes, packed copies, merged groups, partial results."""
