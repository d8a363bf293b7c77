# bwd_d_1_1 of mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc
# schedule mb.qh.qw:128 ic:64 oc:64 | mma | a=gather b=gather | stages=3 warps=4
# target sm_90
# dst: (qh*2 + 2 - th*2) % 2 == 0 is always true: qh*2 - th*2 + 2 is a multiple of 2
# dst: 0 <= oh is always true: qh - th + 1 in 0..28 by qh in 0..27, th in 0..1
# dst: (qw*2 + 2 - tw*2) % 2 == 0 is always true: qw*2 - tw*2 + 2 is a multiple of 2
# dst: 0 <= ow is always true: qw - tw + 1 in 0..28 by qw in 0..27, tw in 0..1

import triton
import triton.language as tl


@triton.jit
def stride_phase(dst, wei, src):
    # dst: 32a28c28d128b [mb=32 oc=128 oh=28 ow=28]
    # wei: 128a3c3d64b [oc=128 ic=64 kh=3 kw=3]
    # src: 32a56c56d64b [mb=32 ic=64 ih=56 iw=56]

    m = tl.arange(0, 128)
    k = tl.arange(0, 64)
    n = tl.arange(0, 64)
    pid = tl.program_id(0)
    mb_qh_qw = pid * 128 + m
    mb = mb_qh_qw // 784
    qh = mb_qh_qw // 28 % 28
    qw = mb_qh_qw % 28
    acc = tl.full((128, 64), 0.0, tl.float32)
    oh_m = qh + 1
    ow_m = qw + 1
    dst_m = mb * 100352 + qh * 3584 + qw * 128 + 3712
    wei_k = k * 576

    for step in tl.range(0, 8, num_stages=3):
        th = step // 4
        tw = step // 2 % 2
        k_blk = step % 2
        oh = oh_m - th
        ow = ow_m - tw
        a = tl.load(dst + (k_blk * 64 - th * 3584 - tw * 128 + dst_m)[:, None] + k[None, :],
                    mask=((oh < 28) & (ow < 28))[:, None], other=0.0)
        b = tl.load(wei + (k_blk * 36864 + th * 384 + tw * 128 + wei_k)[:, None] + n[None, :])
        acc = tl.dot(a, b, acc)

    tl.store(src + (3648 + (mb * 200704 + qh * 7168 + qw * 128))[:, None] + n[None, :],
             acc.to(tl.bfloat16))

# launched with 196 programs
