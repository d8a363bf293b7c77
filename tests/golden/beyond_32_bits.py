# fwd of mb4096ic64ih128oc64oh128kh1 dt=f16
# schedule mb.oh.ow:128 oc:64 ic:32 | mma | a=gather b=gather | stages=3 warps=4
# target sm_90
# src: 0 <= ih is always true: oh in 0..127
# src: ih < 128 is always true: oh in 0..127
# src: 0 <= iw is always true: ow in 0..127
# src: iw < 128 is always true: ow in 0..127

import triton
import triton.language as tl


@triton.jit
def beyond_32_bits(src, wei, dst):
    # src: 4096a64b128c128d [mb=4096 ic=64 ih=128 iw=128]
    # wei: 64a64b1c1d [oc=64 ic=64 kh=1 kw=1]
    # dst: 4096a64b128c128d [mb=4096 oc=64 oh=128 ow=128]

    m = tl.arange(0, 128)
    k = tl.arange(0, 32)
    n = tl.arange(0, 64)
    pid = tl.program_id(0)
    mb_oh_ow = pid * 128 + m
    mb = mb_oh_ow // 16384
    oh = mb_oh_ow // 128 % 128
    ow = mb_oh_ow % 128
    acc = tl.full((128, 64), 0.0, tl.float32)
    src_m = mb.to(tl.int64) * 1048576 + (oh * 128).to(tl.int64) + ow.to(tl.int64)
    src_k = k * 16384
    wei_n = n * 64

    for step in tl.range(0, 2, num_stages=3):
        a = tl.load(src + (step * 524288 + src_m)[:, None] + src_k[None, :])
        b = tl.load(wei + (step * 32 + k)[:, None] + wei_n[None, :])
        acc = tl.dot(a, b, acc)

    tl.store(dst + src_m[:, None] + (n * 16384)[None, :], acc.to(tl.float16))

# launched with 524288 programs
