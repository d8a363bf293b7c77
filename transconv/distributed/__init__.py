"""Convolutions sharded over the ranks of torch.distributed: placements, exchange of rows, whole models.

In: DTensors, and models with a DeviceMesh. Out: DTensors that equal what one process computes. Knows:
torch_ops and the relation of the convolution."""

from transconv.distributed import rules as rules
from transconv.distributed.models import Certificate as Certificate
from transconv.distributed.models import parallelize as parallelize
from transconv.distributed.models import verify as verify
from transconv.distributed.step_capture import Captured as Captured
from transconv.distributed.step_capture import captured as captured

__all__ = ["Captured", "Certificate", "captured", "parallelize", "verify"]
