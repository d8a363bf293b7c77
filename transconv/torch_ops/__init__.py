"""PyTorch integration: functions, modules, autograd, torch.compile.

In: torch tensors. Out: torch tensors, computed by a plan or, with the reason, by torch. Knows:
everything below it.
"""
