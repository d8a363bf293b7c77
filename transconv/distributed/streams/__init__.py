"""Models that take their input piece by piece along time."""
