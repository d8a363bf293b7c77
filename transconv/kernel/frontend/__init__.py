"""The reader of a kernel's Python source: statements, expressions, calls, loops."""
