"""Passes that lower: loop nest, grid, blocks, lanes, sums over several programs."""
