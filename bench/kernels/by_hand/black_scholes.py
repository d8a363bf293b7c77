import torch
import triton
import triton.language as tl


@triton.jit
def options(price_ptr, strike_ptr, years_ptr, call_ptr, put_ptr, n, rate, volatility, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    p = tl.load(price_ptr + at, mask=inside, other=1.0)
    s = tl.load(strike_ptr + at, mask=inside, other=1.0)
    t = tl.load(years_ptr + at, mask=inside, other=1.0)
    spread = volatility * tl.sqrt(t)
    d1 = (tl.log(p / s) + (rate + 0.5 * volatility * volatility) * t) / spread
    d2 = d1 - spread
    n1 = 0.5 + 0.5 * tl.erf(d1 * 0.7071067811865476)
    n2 = 0.5 + 0.5 * tl.erf(d2 * 0.7071067811865476)
    now = s * tl.exp(-rate * t)
    call = p * n1 - now * n2
    tl.store(call_ptr + at, call, mask=inside)
    tl.store(put_ptr + at, call - p + now, mask=inside)


def black_scholes(price, strike, years, rate=0.1, volatility=0.2):
    call = torch.empty_like(price)
    put = torch.empty_like(price)
    n = price.numel()
    options[(triton.cdiv(n, 512),)](
        price, strike, years, call, put, n, rate, volatility, BLOCK=512, num_warps=4
    )
    return call, put
