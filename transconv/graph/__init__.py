"""transconv.graph: whole models by torch.compile, translated operation by operation into computations.

In: graphs of torch's compiler. Out: regions that run as launches of kernels, and a report of what became
of each operation. Knows: the torch border, the functions, and everything below them."""

from transconv.graph.graph_report import GraphReport, KernelRow, Report, TorchRow, report
from transconv.graph.optimization import Optimization, optimize
from transconv.graph.torch_compile import backend

__all__ = [
    "GraphReport",
    "KernelRow",
    "Optimization",
    "Report",
    "TorchRow",
    "backend",
    "optimize",
    "report",
]
