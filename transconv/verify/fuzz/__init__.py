"""The fuzzer: trials, their runs in worker processes, their shrinking."""
