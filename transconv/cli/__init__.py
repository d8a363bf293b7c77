"""The command line, a file for each verb.

In: words. Out: pages, rows, exit codes. Knows: everything."""
