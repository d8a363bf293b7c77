"""Hypothesis strategies: every feature joins here, so that everything is tested with everything."""

from __future__ import annotations

from hypothesis import strategies as st

from transconv.problem import ConvProblem

LAYOUTS = {1: ["ncw", "nwc"], 2: ["nchw", "nhwc", "nChw4c"], 3: ["ncdhw", "ndhwc"]}


@st.composite
def problems(draw: st.DrawFn, ndims: int | None = None, dtype: str = "f32") -> ConvProblem:
    """Small convolutions: 1D/2D/3D, stride, dilation, asymmetric padding, groups, depthwise."""
    n = ndims or draw(st.sampled_from([1, 2, 2, 2, 3]))
    k = tuple(draw(st.integers(1, 3)) for _ in range(n))
    dilation = tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(n))
    stride = tuple(draw(st.sampled_from([1, 1, 2, 3])) for _ in range(n))
    pad = tuple(draw(st.integers(0, 2)) for _ in range(n))
    high = tuple(draw(st.integers(-1, 2)) for _ in range(n))
    o = tuple(draw(st.integers(1, 4 if n < 3 else 3)) for _ in range(n))
    i = tuple((o[x] - 1) * stride[x] + (k[x] - 1) * dilation[x] + 1 - pad[x] - high[x]
              for x in range(n))
    i = tuple(max(1, size) for size in i)
    g = draw(st.sampled_from([1, 1, 2, 3]))
    depthwise = draw(st.booleans()) and g > 1
    ic = g * (1 if depthwise else draw(st.integers(1, 5)))
    oc = g * (1 if depthwise else draw(st.integers(1, 5)))
    layout = draw(st.sampled_from(LAYOUTS[n]))
    tags = (layout, draw(st.sampled_from(["abx", "axb"])), draw(st.sampled_from(LAYOUTS[n])))
    return ConvProblem.make(draw(st.integers(1, 3)), ic, oc, i, k, stride, dilation, pad, o=o, g=g,
                            dtype=dtype, layout=tags)
