"""transconv.graph: whole models by torch.compile, translated operation by operation into computations.

In: graphs of torch's compiler. Out: regions that run as launches of kernels, and a report of what became
of each operation. Knows: the torch border, the functions, and everything below them."""

from importlib.metadata import entry_points

from torch._dynamo.backends import registry

from transconv.graph.reporting import GraphReport, KernelRow, Report, TorchRow, report
from transconv.graph.torch_compile import backend

__all__ = ["GraphReport", "KernelRow", "Report", "TorchRow", "backend", "report"]

# Where the package is not installed with its entry point, the name is known once this is imported.
if not entry_points(group="torch_dynamo_backends", name="transconv"):
    registry.register_backend(backend, "transconv")
