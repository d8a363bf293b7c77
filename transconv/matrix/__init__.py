"""The compile matrix, above the compiler: golden problems as machine code for every chip, what that
code takes, what it has to contain, and the record that it is held to."""
