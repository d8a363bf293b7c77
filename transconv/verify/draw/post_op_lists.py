"""Draws what happens to the sums of a small random convolution: post-ops, scales and zero points."""

from __future__ import annotations

from random import Random

from transconv.compute import table
from transconv.conv import ConvProblem, Prop
from transconv.verify.draw.conv_problems import chance

# The activations that may be drawn; of the exact ones whole numbers stay whole.
DRAWN = table(lambda op: op if op.activation and op.drawn else None)
EXACT = table(lambda op: op if op.activation and op.drawn and op.exact else None)


def epilogue(rng: Random, prop: Prop) -> str:
    """What happens to the sums, ``bias+relu``; a gradient of weights is stored as it is. Mostly
    operations that keep whole numbers whole, so that results are compared bit for bit."""
    if prop is Prop.BWD_W or not chance(rng, 3):
        return ""
    if chance(rng, 2):
        return chain(rng)
    words = [word for word in ("bias", "res") if chance(rng, 2)]
    if rng.randrange(3):
        words.append(rng.choice(tuple(EXACT if rng.randrange(3) else DRAWN)))
    if chance(rng, 6):
        rng.shuffle(words)
    return "+".join(words)


def zeros(rng: Random, p: ConvProblem, prop: Prop) -> list[str]:
    """Words of zero points, if integers are multiplied by integer weights."""
    if prop.roles[1] != "wei" or any(p.specs[n].dtype.kind != "int" for n in prop.operands):
        return []
    data, along, other = ("src", "per_ic", "per_oc") if prop is Prop.FWD else ("dst", "per_oc", "per_ic")
    words = [f"zero:{data}{rng.choice(('', f':{along}'))}"] if chance(rng, 2) else []
    if p.g == 1 and chance(rng, 3):
        words += [f"zero:wei{rng.choice(('', f':{other}'))}"]
    return words


def quantised(rng: Random, prop: Prop) -> str:
    """What happens to sums of products of 8 bits: mostly a scale, then a chain, then a quotient and what
    is added to it; a gradient of weights is stored as it is."""
    if prop is Prop.BWD_W or chance(rng, 6):
        return ""
    words = [rng.choice(("mul:f32:common", "mul:f32:per_oc", "mul:0.25"))] if rng.randrange(4) else []
    words += chain(rng).split("+") if chance(rng, 2) else []
    words += [rng.choice(("div:2", "div:f32:common"))] if chance(rng, 4) else []
    words += [rng.choice(("add:s32:common", "add:s32:per_oc"))] if chance(rng, 3) else []
    return "+".join(words)


EXACT_WORDS = ("relu", "relu:0.5", "relu:-2", "clip:-4:8", "linear:0.5:1.5", "linear:2:-3", "abs", "round",
               "bias", "res", "sum:0.5", "sum:2:1", "mul:0.25", "add:3", "max:-1", "min:4")
ROUNDED_WORDS = ("elu:0.3", "swish:-0.5", "soft_relu:-2", "pow:0.5:2", "tanh:0:0:2.5", "mish",
                 "hardsigmoid:0.3:0.4", "hardswish:0.2:0.6", "linear:0.3:0.1", "logistic", "div:3",
                 "square")
READ = ("add", "add", "mul", "sub", "max", "min", "ge", "lt", "ne", "prelu", "select", "div")
READ_TYPES = ("f32", "f32", "f16", "bf16", "s8", "u8")
READ_MASKS = ("common", "per_oc", "per_oc", "per_tensor", "per_dim_0", "per_dim_01", "4", "5")
LONGEST_CHAIN = 7


def chain(rng: Random) -> str:
    """Post-ops in any order, with numbers and tensors; of most the words keep whole numbers exact. The
    words of scales may stand around them."""
    rounded = chance(rng, 3)
    words: list[str] = []
    for _ in range(rng.randint(1, LONGEST_CHAIN)):
        way = rng.randrange(3)
        if way == 0:
            words.append(_read(rng, rounded))
        else:
            words.append(rng.choice(ROUNDED_WORDS if rounded and way == 1 else EXACT_WORDS))
    once = {w for w in ("bias",) if w in words}
    kept = [w for i, w in enumerate(words) if w not in once or words.index(w) == i]
    if chance(rng, 4):
        kept = ["mul:f32:per_oc", *kept, rng.choice(("div:2", "mul:0.5"))]
    return "+".join(kept)


def _read(rng: Random, rounded: bool) -> str:
    name, mask = rng.choice(READ if rounded else READ[:-1]), rng.choice(READ_MASKS)
    if name == "prelu":
        return f"prelu:{mask}"
    if name == "select":
        return f"select:{rng.choice(READ_TYPES)}.{mask}:{rng.choice(READ_MASKS)}"
    return f"{name}:{rng.choice(READ_TYPES)}:{mask}"
