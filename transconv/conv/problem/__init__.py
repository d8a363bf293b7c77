"""The text of a convolution problem: descriptor, types, layouts, lists of problems."""
