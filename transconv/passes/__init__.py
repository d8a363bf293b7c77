"""The passes: functions from a kernel to a kernel, one file each, in the order of the pipeline."""
