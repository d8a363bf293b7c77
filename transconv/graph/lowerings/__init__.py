"""The rows of aten's operations, which its files enter into the table of operations."""

from transconv.graph.lowerings import elementwise as elementwise
from transconv.graph.lowerings import pools as pools
from transconv.graph.lowerings import products as products
from transconv.graph.lowerings import quantization as quantization
from transconv.graph.lowerings import reductions as reductions
from transconv.graph.lowerings import views as views
