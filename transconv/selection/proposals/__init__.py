"""Proposed schedules, a file for each kind of kernel."""
