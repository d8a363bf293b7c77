# fwd of mb32ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc
# epilogue bias+relu
# schedule mb.oh.ow:128 oc:64 ic:64 | mma | a=gather b=gather | stages=3 warps=4
# target sm_90

import triton
import triton.language as tl


@triton.jit
def dense_nhwc(src, wei, bia, dst):
    # src: 32a56c56d64b [mb=32 ic=64 ih=56 iw=56]
    # wei: 64a3c3d64b [oc=64 ic=64 kh=3 kw=3]
    # bia: 64a [oc=64]
    # dst: 32a56c56d64b [mb=32 oc=64 oh=56 ow=56]

    m = tl.arange(0, 128)
    k = tl.arange(0, 64)
    n = tl.arange(0, 64)
    pid = tl.program_id(0)
    mb_oh_ow = pid * 128 + m
    mb = mb_oh_ow // 3136
    oh = mb_oh_ow // 56 % 56
    ow = mb_oh_ow % 56
    acc = tl.full((128, 64), 0.0, tl.float32)
    ih_m = oh - 1
    iw_m = ow - 1
    src_m = mb * 200704 + oh * 3584 + ow * 64 - 3648
    wei_n = n * 576

    for step in tl.range(0, 9, num_stages=3):
        kh = step // 3
        kw = step % 3
        ih = kh + ih_m
        iw = kw + iw_m
        a = tl.load(src + (kh * 3584 + kw * 64 + src_m)[:, None] + k[None, :],
                    mask=((0 <= ih) & (ih < 56) & (0 <= iw) & (iw < 56))[:, None], other=0.0)
        b = tl.load(wei + (step * 64 + k)[:, None] + wei_n[None, :])
        acc = tl.dot(a, b, acc)

    bia_value = tl.load(bia + n)
    tl.store(dst + (pid * 8192 + m * 64)[:, None] + n[None, :],
             tl.maximum(acc + bia_value.to(tl.float32)[None, :], 0.0,
                        propagate_nan=tl.PropagateNan.ALL).to(tl.bfloat16))

# launched with 784 programs
