"""A convolution as one product: a mapping sees the image (channels last) as a matrix of pixels by taps."""

import torch

from transconv.kernel import Group, create_mapping, kernel


@kernel
def pixels_by_taps(group, X, F, Y):
    (first, n), (_, width, c) = group.work_offset(), X.shape
    kh, kw, _, _ = F.shape
    wide, k = width - kw + 1, kh * kw * c
    taps = create_mapping(
        lambda m, t: ((first + m) // wide + t // (kw * c), (first + m) % wide + t // c % kw, t % c)
    )
    weights = create_mapping(lambda t, o: (t // (kw * c), t // c % kw, t % c, n + o))
    pixels = create_mapping(lambda m, o: ((first + m) // wide, (first + m) % wide, n + o))
    x = group.load(X, shape=(group.shape[0], k), mapping=taps)
    f = group.load(F, shape=(k, group.shape[1]), mapping=weights)
    group.store(Y, x @ f, mapping=pixels)


def implicit_gemm(x, f):
    y = torch.empty(x.shape[0] - f.shape[0] + 1, x.shape[1] - f.shape[1] + 1, f.shape[3], device=x.device)
    pixels_by_taps(Group((y.shape[0] * y.shape[1], y.shape[2]), (32, 16)), x, f, y)
    return y
