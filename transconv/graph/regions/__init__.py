"""Regions of a graph: compiled, run, captured, with what they save for the backward graph."""
