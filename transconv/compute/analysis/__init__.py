"""Properties of computations: factors of products, roles of axes, strides, statistics, sweeps."""
