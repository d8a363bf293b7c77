"""Fused calls: a convolution with its bias, residual and activation, or a traced epilogue."""
