"""Convolutions sharded over the ranks of torch.distributed: placements, exchange of rows, whole models.

In: DTensors, and models with a DeviceMesh. Out: DTensors that equal what one process computes. Knows:
torch_ops and the relation of the convolution.
"""

from transconv.distributed import rules as rules
from transconv.distributed.models import parallelize as parallelize

__all__ = ["parallelize"]
