"""Statements that say the same of all groups: whole numbers of narrow types over their whole range, loads
with padding, indices from the end, sums over loops; plain NumPy computes them on whole arrays at once."""

from __future__ import annotations

from collections.abc import Callable

from transconv.kernel_trials.draw_tiles import TrialPage
from transconv.kernel_trials.trial import Drawn
from transconv.verify.draw.conv_problems import chance

LIMITS = {"i8": (-128, 127), "u8": (0, 255), "i32": (-2**31, 2**31 - 1)}
SHIFTS = (0, 1, 2, 5, 7, 8, 31, 32, 40)


def wholes(d: TrialPage, rows: int, cols: int, dtype: str) -> dict[str, Drawn]:
    """The statements; the arrays that they read and store to. ``dtype``: of tiles of the kind ``n``."""
    d.say("i, j = group.work_offset()")
    d.say("R, C = group.shape")
    for name in "NM":
        d.new(f"group.load({name}[i:, j:], shape=(R, C))", "RCn")
    d.new("group.load(X[i:, j:], shape=(R, C))", "RCe")
    for _ in range(d.rng.choice((2, 3, 4, 5, 6))):
        d.rng.choice(STATEMENTS)(d, dtype)
    made = {"N": Drawn(dtype, _near(d, rows, cols), full=True), "M": Drawn(dtype, (rows, cols), full=True),
            "X": Drawn("f32", _near(d, rows, cols))}
    for name, kind, of in (("P", "n", dtype), ("Y", "e", "f32"), ("B", "b", "bool")):
        found = [n for n, k in d.values.items() if k[2] == kind][-3:]
        for n, value in enumerate(found):
            d.say(f"group.store({name}[{n}, i:, j:], {value})")
        if found:
            made[name] = Drawn(of, (len(found), rows, cols), True)
    return made


def _near(d: TrialPage, rows: int, cols: int) -> tuple[int, int]:
    """Sizes about as large as the work."""
    return max(1, rows + d.rng.choice((0, 0, 0, 2, -1))), max(1, cols + d.rng.choice((0, 0, 0, 3, -2)))


def _number(d: TrialPage, dtype: str) -> int:
    """A number that the type holds; the ends and small ones are likelier."""
    low, high = LIMITS[dtype]
    found = d.rng.choice((low, high, 0, 1, 2, 3, 7, 16, -1, -2, -3, -7, low + 1, high - 1,
                          d.rng.randint(low, high)))
    return min(max(found, low), high)


def _any(d: TrialPage, dtype: str) -> int:
    """A number that the type may hold or not."""
    low, high = LIMITS[dtype]
    return d.rng.choice((_number(d, dtype), low - 1, high + 1, -low - 1000, -high - 1, 3 * high, -5, 300))


def _said(number: int) -> str:
    return f"({number})" if number < 0 else f"{number}"


def _arithmetic(d: TrialPage, dtype: str) -> None:
    a, b, c = d.pick("n"), d.pick("n"), _said(_number(d, dtype))
    op = d.rng.choice(("{} + {}", "{} - {}", "{} * {}", "{} // {}", "{} % {}", "{} & {}", "{} | {}",
                       "{} ^ {}", "np.maximum({}, {})", "np.minimum({}, {})", "{} << {}", "{} >> {}"))
    if ("<<" in op or ">>" in op) and chance(d.rng, 2):
        high = LIMITS[dtype][1]
        c = str(min(d.rng.choice(SHIFTS), high))
    left, right = d.rng.choice(((a, b), (a, c), (a, c), (c, a)))
    d.new(op.format(left, right), "RCn")


def _alone(d: TrialPage, dtype: str) -> None:
    a = d.pick("n")
    low, high = sorted((_any(d, dtype), _any(d, dtype)))
    least, most = LIMITS[dtype]
    low, high = min(low, most), max(high, least)
    d.new(d.rng.choice((f"-{a}", f"~{a}", f"abs({a})", f"np.sign({a})", f"np.square({a})", f"+{a}",
                        f"{a} ** {d.rng.choice((0, 1, 2, 3, 5, 9, 12, 100))}", f"{a}.copy()",
                        f"np.clip({a}, {low}, {high})", f"np.clip({a}, {low}, None)",
                        f"np.clip({a}, None, {high})",
                        f"np.negative({a})", f"np.invert({a})")), "RCn")


def _compared(d: TrialPage, dtype: str) -> None:
    a, b, c = d.pick("n"), d.pick("n"), _said(_any(d, dtype))
    op = d.rng.choice(("<", "<=", ">", ">=", "==", "!="))
    left, right = d.rng.choice(((a, b), (a, c), (c, a)))
    d.new(f"{left} {op} {right}", "RCb")


def _chosen(d: TrialPage, dtype: str) -> None:
    a, b = d.pick("n"), d.pick("n")
    test = d.rng.choice((f"{a} < {_said(_any(d, dtype))}", f"{a} > {b}", f"{d.pick('e')} > 0.25",
                         f"({a} > {b}) & ({b} != {_said(_any(d, dtype))})", f"~({a} == {b})"))
    d.new(f"np.where({test}, {a}, {d.rng.choice((b, _said(_number(d, dtype)), '-1'))})", "RCn")


def _moved(d: TrialPage, dtype: str) -> None:
    """A load from places around, with or without a number outside."""
    name, kind = d.rng.choice((("N", "n"), ("M", "n"), ("X", "e")))
    up, left = d.rng.choice((-3, -1, 0, 2)), d.rng.choice((-2, -1, 0, 1))
    part = ", ".join(f"{x} {'-' if n < 0 else '+'} {abs(n)}:" if n else f"{x}:"
                     for x, n in (("i", up), ("j", left)))
    fill = _number(d, dtype) if kind == "n" else d.rng.choice((0.0, -1.5, 2.0))
    if min(up, left) < 0 or chance(d.rng, 3):
        d.new(f"group.load({name}[{part}], shape=(R, C), fill={fill})", f"RC{kind}")
    else:
        d.new(f"group.load({name}[{part}], shape=(R, C))", f"RC{kind}")


def _gathered(d: TrialPage, dtype: str) -> None:
    """Elements at places that a tile tells, from the end and outside, too."""
    a, b, (name, kind) = d.pick("n"), d.pick("n"), d.rng.choice((("N", "n"), ("X", "e")))
    at = [f"{n}.astype(np.int32) % {d.rng.choice((5, 9, 40))} - {d.rng.choice((0, 2, 6))}" for n in (a, b)]
    d.new(f"{name}[{at[0]}, {at[1]}]", f"RC{kind}")


def _looped(d: TrialPage, dtype: str) -> None:
    """A tile that a loop changes, also by ``out=``."""
    a, b = d.pick("n"), d.pick("n")
    acc = d.new(f"{a}.copy()", "RCn")
    d.say(f"for k in range({d.rng.choice(('3', 'X.shape[1]', '1, 4'))}):")
    d.deep += 1
    ufunc = d.rng.choice(("add", "subtract", "multiply", "maximum", "bitwise_xor"))
    d.say(d.rng.choice((f"{acc} = np.{ufunc}({acc}, {b}, out={acc})", f"np.{ufunc}({acc}, {b}, out={acc})",
                        f"{acc} += group.load(N[i:, j + k:], shape=(R, C), fill=1)",
                        f"{acc} = {acc} * 3 - {b}",
                        f"{acc} = {acc} // 3 + np.{ufunc}({b}, {acc})",
                        f"{acc} = {b} + np.{ufunc}({acc}, {b}, out={acc})")))
    d.deep -= 1


def _written(d: TrialPage, dtype: str) -> None:
    a, b = d.pick("n"), d.pick("n")
    made = d.new(f"{a}.copy()", "RCn")
    d.say(d.rng.choice((f"{made}[:] = {b}", f"{made}[:, :] = {_number(d, dtype)}",
                        f"{made}[:, :] = np.where({b} > {a}, {b}, {_said(_number(d, dtype))})")))


def _cast(d: TrialPage, dtype: str) -> None:
    a, b = d.pick("n"), d.pick("bn")
    other, name = d.rng.choice((("int8", "i8"), ("uint8", "u8"), ("int32", "i32")))
    home = {"i8": "int8", "u8": "uint8", "i32": "int32"}[dtype]
    text = d.rng.choice((f"({a}.astype(np.{other}) + 1)", f"({a}.astype(np.{other}) // 3)",
                         f"{b}.astype(np.{other})", f"(-{a}.astype(np.{other}))"))
    d.new(f"{text}.astype(np.{home})", "RCn")


def _floated(d: TrialPage, dtype: str) -> None:
    a, e = d.pick("n"), d.pick("e")
    d.new(d.rng.choice((f"np.where({a} > {_said(_any(d, dtype))}, {e}, 0.5)",
                        f"np.maximum({e}, -{e})", f"({a} & 3) * 0.25 + {e} * 0.5")), "RCe")


STATEMENTS: tuple[Callable[[TrialPage, str], None], ...] = (
    _arithmetic, _arithmetic, _arithmetic, _alone, _alone, _compared, _chosen, _chosen, _moved, _moved,
    _gathered, _looped, _looped, _written, _cast, _floated)
