"""Legality of schedules: None, or a sentence that says why not."""
