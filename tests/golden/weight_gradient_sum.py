# bwd_w_sum of mb32ic64ih56oc128oh28kh3sh2ph1 dt=bf16 tag=nhwc
# schedule oc:256 | fma | a=gather b=gather | stages=3 warps=4
# target sm_90

import triton
import triton.language as tl


@triton.jit
def weight_gradient_sum(partials, wei):
    # partials: 8a128b3d3e64c [part=8 oc=128 ic=64 kh=3 kw=3]
    # wei: 128a3c3d64b [oc=128 ic=64 kh=3 kw=3]

    m = tl.arange(0, 256)
    pid = tl.program_id(0)
    oc = m
    acc = tl.full((256,), 0.0, tl.float32)
    partials_m = oc * 576
    partials_in_m = oc < 128

    for step in tl.range(0, 8, num_stages=3):
        a = tl.load(partials + step * 73728 + pid + partials_m, mask=partials_in_m, other=0.0)
        acc = acc + a.to(tl.float32)

    tl.store(wei + pid + partials_m, acc.to(tl.bfloat16), mask=partials_in_m)

# launched with 576 programs
