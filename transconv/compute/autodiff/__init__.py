"""Gradients of a computation as computations: reverse mode, adjoints of views, their inverses."""
