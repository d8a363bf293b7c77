# fwd of mb16ic3ih224oc64oh112kh7sh2ph3 dt=f16 tag=nhwc
# schedule mb.oh.ow:128 oc:64 kw.ic:32 | mma | a=gather b=gather | stages=3 warps=4
# target sm_90

import triton
import triton.language as tl


@triton.jit
def stem_folded(src, wei, dst):
    # src: 16a224c224d3b [mb=16 ic=3 ih=224 iw=224]
    # wei: 64a7c7d3b [oc=64 ic=3 kh=7 kw=7]
    # dst: 16a112c112d64b [mb=16 oc=64 oh=112 ow=112]

    m = tl.arange(0, 128)
    k = tl.arange(0, 32)
    n = tl.arange(0, 64)
    pid = tl.program_id(0)
    mb_oh_ow = pid * 128 + m
    mb = mb_oh_ow // 12544
    oh = mb_oh_ow // 112 % 112
    ow = mb_oh_ow % 112
    acc = tl.full((128, 64), 0.0, tl.float32)
    kw_ic = k
    kw = kw_ic // 3
    ic = kw_ic % 3
    ih_m = oh * 2 - 3
    iw = (ow * 2)[:, None] + kw[None, :] - 3
    src_m = mb * 150528 + oh * 1344 + ow * 6 - 2025
    src_k = ic + kw * 3
    src_in_k = kw_ic < 21
    src_in_m_k = (0 <= iw) & (iw < 224)
    wei_n = n * 147

    for step in tl.range(0, 7, num_stages=3):
        ih = step + ih_m
        a = tl.load(src + (step * 672 + src_m)[:, None] + src_k[None, :],
                    mask=src_in_k[None, :] & src_in_m_k & ((0 <= ih) & (ih < 224))[:, None], other=0.0)
        b = tl.load(wei + (step * 21 + kw_ic)[:, None] + wei_n[None, :],
                    mask=src_in_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc)

    tl.store(dst + (pid * 8192 + m * 64)[:, None] + n[None, :], acc.to(tl.float16))

# launched with 1568 programs
