"""A call of a function: its binding to sizes, its launches, its caches, its derivatives."""
