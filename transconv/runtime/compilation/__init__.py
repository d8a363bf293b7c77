"""Compilation beside a program: requests for plans, child processes, batches."""
