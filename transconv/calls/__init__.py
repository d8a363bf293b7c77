"""Calls of torch: how one is recognised, who computes it, at which sizes, and what is counted.

In: tensors and numbers of a call. Out: what runs it, with nothing left to decide. Knows: torch, and the
plans of runtime; not what is computed."""
