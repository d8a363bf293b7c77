"""transconv.graph: whole models by torch.compile, translated operation by operation into computations.

In: graphs of torch's compiler. Out: regions that run as launches of kernels, and a report of what became
of each operation. Knows: the torch border, the functions, and everything below them."""

from transconv.graph.backend import backend
from transconv.graph.report import GraphReport, KernelRow, Report, TorchRow, report

__all__ = ["GraphReport", "KernelRow", "Report", "TorchRow", "backend", "report"]
