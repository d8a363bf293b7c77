"""Texts with gradients: every reduction, every kind of view, products, several results."""

from __future__ import annotations

import torch

import transconv

TEXTS = {
    "sum": "axes n=4 k=5 ;; read x = X[n, k] ;; read w = W[k] ;; store Y[n] = sum(x*w; k)",
    "max": "axes n=4 k=5 ;; read x = X[n, k] ;; read w = W[k] ;; store Y[n] = max(x*w; k)",
    "min": "axes n=4 k=5 j=2 ;; read x = X[n, k] ;; store Y[n] = min(x; k j)",
    "prod": "axes n=4 k=5 ;; read x = X[n, k] ;; store Y[n] = prod(x + 1; k) ;; store Z[n] = min(x; k)",
    "nothing_along": "axes n=4 k=5 ;; read w = W[n] ;; store Y[n] = sum(w*w; k) + max(w; k)",
    "variance": "axes n=4 k=5 ;; read x = X[n, k] ;; let mean = sum(x; k) / 5 ;; let d = x - mean ;; "
    "store V[n] = sum(d*d; k) / 4 ;; store M[n] = mean",
    "logsumexp": "axes n=4 k=5 ;; read x = X[n, k] ;; let top = max(x; k) ;; "
    "store Y[n] = log(sum(exp(x - top); k)) + top",
    "softmax": "axes n=4 k=5 ;; read x = X[n, k] ;; let top = max(x; k) ;; let e = exp(x - top) ;; "
    "let total = sum(e; k) ;; store Y[n, k] = e / total",
    "layer_norm": "axes n=4 k=5 ;; read x = X[n, k] ;; let mean = sum(x; k) / 5 ;; let d = x - mean ;; "
    "let v = sum(d*d; k) / 5 ;; read w = W[k] ;; read b = B[k] ;; "
    "store Y[n, k] = d*rsqrt(v + 1e-5)*w + b",
    "over_rows_and_columns": "axes n=4 k=5 ;; read x = X[n, k] ;; let r = sum(x*x; n) ;; "
    "let c = sum(x*r; k) ;; store Y[n, k] = x*c ;; store Z[k] = r",
    "linear": "axes m=6 n=5 | k=7 ;; read x = X[m, k] ;; read w = W[n, k] ;; let s = sum(x*w; k) ;; "
    "read b = B[n] ;; read r = R[m, n] ;; store Y[m, n] = gelu(s + b)*r ;; store S[m, n] = s",
    "attention": "axes m=4 n=5 d=3 ;; read q = Q[m, d] ;; read k = K[n, d] ;; let s = sum(q*k; d) ;; "
    "let top = max(s; n) ;; let e = exp(s - top) ;; let z = sum(e; n) ;; "
    "read v = V[n, d] ;; store O[m, d] = sum(e*v; n) / z",
    "statistics": "axes m=16 n=16 | k=3 ;; read a = X[m, k] ;; read w = W[n, k] ;; let s = sum(a*w; k) ;; "
    "store Y[m, n] = s ;; store M[n//8] sum= s ;; store D[n//8] squares= s",
    "convolution": "tensor X f32 [2, 2, 7, 6] ;; axes n=2 o=3 h=4 w=3 | c=2 i=3 j=3 ;; "
    "read x = X[n, c, h*2 + i - 1, w*2 + j - 1] ;; read k = W[o, c, i, j] ;; "
    "read b = B[o] ;; let s = sum(x*k; c i j) ;; store Y[n, o, h, w] = relu(s + b)",
    "max_pool": "tensor X f32 [2, 5, 5] ;; axes n=2 h=3 w=3 | i=3 j=3 ;; "
    "read x = X[n, h*2 + i - 1, w*2 + j - 1] else -inf ;; store Y[n, h, w] = max(x; i j)",
    "permute_and_flip": "axes i=4 j=5 ;; read x = X[4 - j, i] ;; store Y[i, j] = sin(x)",
    "reshape": "axes i=6 j=4 ;; read x = X[i*4 + j] ;; read z = Z[i // 3, i % 3] ;; store Y[i, j] = x*z",
    "slice": "tensor X f32 [9] ;; axes i=4 ;; read x = X[i*2 + 1] ;; store Y[i] = x*x",
    "pad": "tensor X f32 [5] ;; axes i=9 ;; read x = X[i - 2] else 3 ;; store Y[i] = x*x",
    "reflect": "tensor X f32 [5] ;; axes i=9 ;; read x = X[reflect(i - 2, 5)] ;; store Y[i] = x*x",
    "replicate": "tensor X f32 [5] ;; axes n=2 i=9 ;; read x = X[clamp(i - 2, 5)] ;; read z = Z[n, i] ;; "
    "let s = sum(exp(x*z); i) ;; store Y[n, i] = x*s",
    "circular": "tensor X f32 [5] ;; axes i=9 ;; read x = X[wrap(i - 2, 5)] ;; store Y[i] = exp(x)",
    "upsample": "axes h=6 w=6 ;; read x = X[h // 2, w // 3] ;; store Y[h, w] = x*h",
    "shuffle": "axes c=2 h=4 w=6 ;; read x = X[c*4 + h % 2*2 + w % 2, h // 2, w // 2] ;; "
    "store Y[c, h, w] = exp(x)",
    "expand": "axes i=4 j=3 ;; read x = X[i, 0] ;; store Y[i, j] = x*j",
    "gather": "tensor I i64 [6] ;; tensor X f32 [4, 3] ;; axes n=6 k=3 ;; read i = I[n] ;; "
    "read x = X[i, k] ;; store Y[n, k] = x*x",
    "scatter": "tensor I i64 [6] ;; tensor Y f32 [4, 3] ;; axes n=6 k=3 ;; read i = I[n] ;; "
    "read x = X[n, k] ;; store Y[i, k] += x*x",
    "concatenation": "tensor I i64 [4] ;; tensor X f32 [5, 6] ;; tensor S f32 [4, 3] ;; "
    "tensor W f32 [7, 9] ;; axes m=4 n=7 | k=9 ;; read i = I[m] ;; "
    "read a = X[i, k] ;; read b = S[m, k - 6] ;; let x = where(k < 6, a, b) ;; "
    "read w = W[n, k] ;; store Y[m, n] = sum(x*w; k)",
    "two_views": "axes i=8 ;; read a = X[i] ;; read b = X[i + 1] ;; read c = X[i] ;; "
    "store Y[i] = (a - b)**2*c",
    "conditions": "tensor X f32 [6] ;; axes i=6 j=4 ;; read x = X[i] where j < 2 ;; "
    "store Y[i, j] = where(x > 0.1, x*x, -x)",
}


def operands(f: transconv.functional.computation.Computation, device: str = "cpu") -> list[torch.Tensor]:
    """Random tensors for a text: floats that need gradients, and indices below 4."""
    return [
        torch.randn(m.shape, dtype=m.dtype, device=device).requires_grad_()
        if m.dtype.is_floating_point
        else torch.randint(0, 4, m.shape, dtype=m.dtype, device=device)
        for m in f.program.given.values()
    ]
