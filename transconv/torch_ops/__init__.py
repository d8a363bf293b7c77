"""PyTorch integration: functions, modules, autograd, torch.compile.

In: torch tensors. Out: torch tensors, computed by a plan or, with the reason, by torch. Knows:
everything below it."""

# These register what computes the operators.
from transconv.torch_ops import operators as operators
from transconv.torch_ops.fused import fused_route as fused_route
from transconv.torch_ops.quantized import quantized_route as quantized_route
