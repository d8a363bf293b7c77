# fwd of mb32ic256ih14oc64oh14kh1 dt=f16
# schedule mb.oh.ow:64 oc:64 ic:32 | mma | a=gather b=gather | stages=4 warps=4
# target sm_90
# src: 0 <= ih is always true: oh in 0..13
# src: ih < 14 is always true: oh in 0..13
# src: 0 <= iw is always true: ow in 0..13
# src: iw < 14 is always true: ow in 0..13

import triton
import triton.language as tl


@triton.jit
def pointwise_nchw(src, wei, dst):
    # src: 32a256b14c14d [mb=32 ic=256 ih=14 iw=14]
    # wei: 64a256b1c1d [oc=64 ic=256 kh=1 kw=1]
    # dst: 32a64b14c14d [mb=32 oc=64 oh=14 ow=14]

    m = tl.arange(0, 64)
    k = tl.arange(0, 32)
    n = tl.arange(0, 64)
    pid = tl.program_id(0)
    mb_oh_ow = pid * 64 + m
    mb = mb_oh_ow // 196
    oh = mb_oh_ow // 14 % 14
    ow = mb_oh_ow % 14
    acc = tl.full((64, 64), 0.0, tl.float32)
    src_m = mb * 50176 + oh * 14 + ow
    src_k = k * 196
    wei_n = n * 256

    for step in tl.range(0, 8, num_stages=4):
        a = tl.load(src + (step * 6272 + src_m)[:, None] + src_k[None, :])
        b = tl.load(wei + (step * 32 + k)[:, None] + wei_n[None, :])
        acc = tl.dot(a, b, acc)

    tl.store(dst + (mb * 12544 + oh * 14 + ow)[:, None] + (n * 196)[None, :], acc.to(tl.float16))

# launched with 98 programs
