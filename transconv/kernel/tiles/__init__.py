"""Tiles of a kernel: shapes, lanes, masks, loads, products, reductions."""
