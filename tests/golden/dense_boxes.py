# fwd of mb32ic64ih56oc64oh56kh3ph1 dt=bf16 tag=nhwc
# schedule mb:2 oh:8 ow:8 oc:64 ic:64 | mma | a=box b=box | c=box swap=1 programs=132 stages=4 warps=4
# target sm_90

import triton
import triton.language as tl


@triton.jit
def dense_boxes(src_box, wei_box, dst_box):
    # src: 32a56b56c64d [mb=32 ih=56 iw=56 ic=64] in boxes of [2, 8, 8, 64]
    # wei: 64a576b [oc=64 kh_kw_ic=576] in boxes of [64, 64]
    # dst: 32a56b56c64d [mb=32 oh=56 ow=56 oc=64] in boxes of [2, 8, 8, 64]

    for pid in tl.range(tl.program_id(0), 784, 132, flatten=True):
        mb_blk = pid // 49
        oh_blk = pid // 7 % 7
        ow_blk = pid % 7
        acc = tl.full((64, 128), 0.0, tl.float32)

        for step in tl.range(0, 9, num_stages=4):
            kh = step // 3
            kw = step % 3
            a = src_box.load([mb_blk * 2, oh_blk * 8 + kh - 1, ow_blk * 8 + kw - 1,
                              0]).reshape(128, 64).T
            b = wei_box.load([0, kh * 192 + kw * 64])
            acc = tl.dot(b, a, acc)

        dst_box.store([mb_blk * 2, oh_blk * 8, ow_blk * 8, 0],
                      acc.to(tl.bfloat16).T.reshape(2, 8, 8, 64))

# launched with 132 programs
