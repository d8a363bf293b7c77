"""transconv.integrations: the programs that people run already, each in a file; none is imported unasked.

In: trainers and pipelines of other packages. Out: the same objects, computed by kernels. Knows: the torch
border, whole models, and of each package its public classes."""
