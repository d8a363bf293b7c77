"""PyTorch integration: functions, modules, autograd, torch.compile.

In: torch tensors. Out: torch tensors, computed by a plan or, with the reason, by torch. Knows:
everything below it.
"""

from transconv.torch_ops import library as library
from transconv.torch_ops.fused import (
    fused_route as fused_route,  # registers the operators of graphs
)
from transconv.torch_ops.quantized import quantized_route as quantized_route
