"""The table of operations: how each of aten's becomes pieces, a file for a family."""
