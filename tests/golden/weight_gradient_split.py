# bwd_w of mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc
# schedule ic:64 oc:128 mb.oh.ow:64 | mma | a=gather b=gather | split_k=8 stages=3 warps=4
# target sm_90
# src: ih < 56 is always true: oh*2 + kh - 1 in -1..55 by kh in 0..2, oh in 0..27
# src: iw < 56 is always true: ow*2 + kw - 1 in -1..55 by kw in 0..2, ow in 0..27

import triton
import triton.language as tl


@triton.jit
def weight_gradient_split(src, dst, partials):
    # src: 32a56c56d64b [mb=32 ic=64 ih=56 iw=56]
    # dst: 32a28c28d128b [mb=32 oc=128 oh=28 ow=28]
    # partials: 8a128b3d3e64c [part=8 oc=128 ic=64 kh=3 kw=3]

    m = tl.arange(0, 64)
    k = tl.arange(0, 64)
    n = tl.arange(0, 128)
    pid = tl.program_id(0)
    part = pid // 9
    tile = pid % 9
    kh = tile // 3
    kw = tile % 3
    acc = tl.full((64, 128), 0.0, tl.float32)
    step_base = part * 49
    ih_base = kh - 1
    iw_base = kw - 1
    src_base = kh * 3584 + kw * 64 - 3648

    for turn in tl.range(0, 49, num_stages=3):
        step = turn + step_base
        mb_oh_ow = step * 64 + k
        mb = mb_oh_ow // 784
        oh = mb_oh_ow // 28 % 28
        ow = mb_oh_ow % 28
        ih = ih_base + oh * 2
        iw = iw_base + ow * 2
        a = tl.load(src + (src_base + m)[:, None] + (mb * 200704 + oh * 7168 + ow * 128)[None, :],
                    mask=((0 <= ih) & (0 <= iw))[None, :], other=0.0)
        b = tl.load(dst + (mb * 100352 + oh * 3584 + ow * 128)[:, None] + n[None, :])
        acc = tl.dot(a, b, acc)

    tl.store(partials + (part * 73728 + kh * 192 + kw * 64 + m)[:, None] + (n * 576)[None, :], acc)

# launched with 72 programs
