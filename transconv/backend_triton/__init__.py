"""The Triton backend: IR -> source text -> JIT function -> launch."""
