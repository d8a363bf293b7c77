"""A call of a convolution: its route, its guards and caches, its gradients."""
