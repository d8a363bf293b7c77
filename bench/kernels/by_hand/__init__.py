"""The kernels of ``bench/kernels`` written by hand in Triton: each file has a function of the name, with
the arguments of the function in ``examples/kernels``. Tiles, warps and stages are fixed: those of Triton's
tutorials where there is one."""
