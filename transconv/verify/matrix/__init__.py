"""The compile matrix: golden problems as machine code for every chip.

In: problems, chips. Out: what the code takes, what it has to contain, and the record that it is held
to. Knows: the runtime and what is below it.
"""
