# bwd_w of g96mb8ic96ih28oc96oh28kh3ph1 dt=f16 tag=nhwc
# schedule kw:3 mb.oh:8 ow:4 g:32 | fma | a=gather b=gather | split_k=16 regs=ow.kw late=1 stages=1 warps=4
# target sm_90
# src: iw_0_0 < 28 is always true: ow_blk*4 - 1 in -1..23 by ow_blk in 0..6
# src: 0 <= ow_0 is always true: ow_blk*4 in 0..24 by ow_blk in 0..6
# src: ow_0 < 28 is always true: ow_blk*4 in 0..24 by ow_blk in 0..6
# src: 0 <= ow_1 is always true: ow_blk*4 + 1 in 1..25 by ow_blk in 0..6 (and 2 more like it)
# src: ow_1 < 28 is always true: ow_blk*4 + 1 in 1..25 by ow_blk in 0..6 (and 2 more like it)
# src: 0 <= iw_3_2 is always true: ow_blk*4 + 4 in 4..28 by ow_blk in 0..6

import triton
import triton.language as tl


@triton.jit
def depthwise_sliding(src, dst, partials):
    # src: 8a28c28d96b [mb=8 ic=96 ih=28 iw=28]
    # dst: 8a28c28d96b [mb=8 oc=96 oh=28 ow=28]
    # partials: 16a96b3d3e1c [part=16 oc=96 ic=1 kh=3 kw=3]

    grp = tl.arange(0, 32)
    k = tl.arange(0, 8)
    pid = tl.program_id(0)
    part = pid // 9
    tile = pid % 9
    grp_blk = tile // 3
    mn_blk = tile % 3
    sums_0 = tl.full((32, 8), 0.0, tl.float32)
    sums_1 = tl.full((32, 8), 0.0, tl.float32)
    sums_2 = tl.full((32, 8), 0.0, tl.float32)
    step_base = part * 13
    ih_base = mn_blk - 1
    src_base = grp_blk * 32 + mn_blk * 2688 - 2784
    src_base_2 = grp_blk * 32 + mn_blk * 2688 - 2688
    src_base_3 = grp_blk * 32 + mn_blk * 2688 - 2592
    src_base_4 = grp_blk * 32 + mn_blk * 2688 - 2496
    src_base_5 = grp_blk * 32 + mn_blk * 2688 - 2400
    src_base_6 = grp_blk * 32 + mn_blk * 2688 - 2304
    dst_base = grp_blk * 32
    dst_base_2 = dst_base + 96
    dst_base_3 = dst_base + 192
    dst_base_4 = dst_base + 288

    for turn in tl.range(0, 13, num_stages=1):
        step = turn + step_base
        k_blk = step // 7
        ow_blk = step % 7
        mb_oh = k_blk * 8 + k
        mb = mb_oh // 28
        oh = mb_oh % 28
        ow_0 = ow_blk * 4
        ow_3 = ow_0 + 3
        ih = ih_base + oh
        iw_0_0 = ow_0 - 1
        iw_3_2 = ow_3 + 1
        a_0_0 = tl.load(src + (ow_blk * 384 + src_base + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                        mask=((0 <= ih) & (ih < 28) & ((0 <= iw_0_0) & (step < 196)))[None, :], other=0.0)
        a_0_1 = tl.load(src + (ow_blk * 384 + src_base_2 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                        mask=((0 <= ih) & (ih < 28) & (step < 196))[None, :], other=0.0)
        a_0_2 = tl.load(src + (ow_blk * 384 + src_base_3 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                        mask=((0 <= ih) & (ih < 28) & (step < 196))[None, :], other=0.0)
        a_1_2 = tl.load(src + (ow_blk * 384 + src_base_4 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                        mask=((0 <= ih) & (ih < 28) & (step < 196))[None, :], other=0.0)
        a_2_2 = tl.load(src + (ow_blk * 384 + src_base_5 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                        mask=((0 <= ih) & (ih < 28) & (step < 196))[None, :], other=0.0)
        a_3_2 = tl.load(src + (ow_blk * 384 + src_base_6 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                        mask=((0 <= ih) & (ih < 28) & ((iw_3_2 < 28) & (step < 196)))[None, :], other=0.0)
        b_0 = tl.load(dst + (ow_blk * 384 + dst_base + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                      mask=step < 196, other=0.0)
        b_1 = tl.load(dst + (ow_blk * 384 + dst_base_2 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                      mask=step < 196, other=0.0)
        b_2 = tl.load(dst + (ow_blk * 384 + dst_base_3 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                      mask=step < 196, other=0.0)
        b_3 = tl.load(dst + (ow_blk * 384 + dst_base_4 + grp)[:, None] + (mb * 75264 + oh * 2688)[None, :],
                      mask=step < 196, other=0.0)
        sums_0 = sums_0 + a_0_0.to(tl.float32) * b_0.to(tl.float32)
        sums_1 = sums_1 + a_0_1.to(tl.float32) * b_0.to(tl.float32)
        sums_2 = sums_2 + a_0_2.to(tl.float32) * b_0.to(tl.float32)
        sums_0 = sums_0 + a_0_1.to(tl.float32) * b_1.to(tl.float32)
        sums_1 = sums_1 + a_0_2.to(tl.float32) * b_1.to(tl.float32)
        sums_2 = sums_2 + a_1_2.to(tl.float32) * b_1.to(tl.float32)
        sums_0 = sums_0 + a_0_2.to(tl.float32) * b_2.to(tl.float32)
        sums_1 = sums_1 + a_1_2.to(tl.float32) * b_2.to(tl.float32)
        sums_2 = sums_2 + a_2_2.to(tl.float32) * b_2.to(tl.float32)
        sums_0 = sums_0 + a_1_2.to(tl.float32) * b_3.to(tl.float32)
        sums_1 = sums_1 + a_2_2.to(tl.float32) * b_3.to(tl.float32)
        sums_2 = sums_2 + a_3_2.to(tl.float32) * b_3.to(tl.float32)

    acc_0 = tl.sum(sums_0, axis=1)
    acc_1 = tl.sum(sums_1, axis=1)
    acc_2 = tl.sum(sums_2, axis=1)
    tl.store(partials + part * 864 + grp_blk * 288 + mn_blk * 3 + grp * 9, acc_0)
    tl.store(partials + part * 864 + grp_blk * 288 + mn_blk * 3 + 1 + grp * 9, acc_1)
    tl.store(partials + part * 864 + grp_blk * 288 + mn_blk * 3 + 2 + grp * 9, acc_2)

# launched with 144 programs
