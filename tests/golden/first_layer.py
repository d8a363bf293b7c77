# fwd of mb128ic4ih224oc64oh112kh7sh2ph3 dt=f16 tag=nChw4c:oIhw4i:nchw
# schedule mb:1 oh:16 ow:16 oc:64 kw.ic:32 | mma | a=gather b=gather | stages=3 warps=8
# target sm_90

import triton
import triton.language as tl


@triton.jit
def first_layer(src, wei, dst):
    # src: 128a1b224c224d4b [mb=128 ic=4 ih=224 iw=224]
    # wei: 64a1b7c7d4b [oc=64 ic=4 kh=7 kw=7]
    # dst: 128a64b112c112d [mb=128 oc=64 oh=112 ow=112]

    m = tl.arange(0, 256)
    k = tl.arange(0, 32)
    n = tl.arange(0, 64)
    pid = tl.program_id(0)
    mb = pid // 49
    oh_blk = pid // 7 % 7
    ow_blk = pid % 7
    oh_in = m // 16
    oh = oh_blk * 16 + oh_in
    ow_in = m % 16
    ow = ow_blk * 16 + ow_in
    acc = tl.full((256, 64), 0.0, tl.float32)
    kw_ic = k
    kw = kw_ic // 4
    ih_m = oh * 2 - 3
    iw = (ow * 2)[:, None] + kw[None, :] - 3
    src_base = mb * 200704 + oh_blk * 28672 + ow_blk * 128 - 2700
    src_m = oh_in * 1792 + ow_in * 8
    src_in_k = kw_ic < 28
    src_in_m_k = (0 <= iw) & (iw < 224)
    wei_n = n * 196

    for step in tl.range(0, 7, num_stages=3):
        ih = step + ih_m
        a = tl.load(src + (step * 896 + src_base + src_m)[:, None] + kw_ic[None, :],
                    mask=src_in_k[None, :] & src_in_m_k & ((0 <= ih) & (ih < 224))[:, None], other=0.0)
        b = tl.load(wei + (step * 28 + kw_ic)[:, None] + wei_n[None, :],
                    mask=src_in_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc)

    tl.store(dst + (mb * 802816 + oh_blk * 1792 + ow_blk * 16 + (oh_in * 112 + ow_in))[:, None] + (n * 12544)[None, :], acc.to(tl.float16))

# launched with 6272 programs
