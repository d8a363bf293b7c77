"""Drawn problems, computations and schedules."""
