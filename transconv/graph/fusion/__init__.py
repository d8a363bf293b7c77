"""Fusion: which values one kernel computes, what is stored, the texts of groups."""
