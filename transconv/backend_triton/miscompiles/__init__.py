"""Known miscompiles of Triton and ptxas, found in intermediate forms and machine code."""
