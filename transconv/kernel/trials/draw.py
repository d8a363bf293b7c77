"""Drawn kernels: statements over tiles, or a body of work-items.

Comparisons and indices are of exact values alone, so that engines that round otherwise decide alike, and
values stay small, so that roundings do. Arrays are empty, smaller and larger than tiles; groups reach
beyond the work.

Some programs say the same of all groups: integers of narrow types over their whole range, loads with
padding, indices from the end, sums over loops; plain NumPy computes them on whole arrays at once."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from transconv.kernel.trials.draw_tiles import STATEMENTS, TrialPage, begin, stores
from transconv.kernel.trials.trial import Drawn, KernelTrial
from transconv.verify.fuzz.main_loop import run_trial
from transconv.verify.fuzz.trial import Row, TrialKind, chance

LIMITS = {"i8": (-128, 127), "u8": (0, 255), "i32": (-(2**31), 2**31 - 1)}
SHIFTS = (0, 1, 2, 5, 7, 8, 31, 32, 40)


def wholes(d: TrialPage, rows: int, cols: int, dtype: str) -> dict[str, Drawn]:
    """The statements; the arrays that they read and store to. ``dtype``: of tiles of the kind ``n``."""
    d.say("i, j = group.work_offset()")
    d.say("R, C = group.shape")
    for name in "NM":
        d.new(f"group.load({name}[i:, j:], shape=(R, C))", "RCn")
    d.new("group.load(X[i:, j:], shape=(R, C))", "RCe")
    for _ in range(d.rng.choice((2, 3, 4, 5, 6))):
        d.rng.choice(OF_INTEGERS)(d, dtype)
    made = {
        "N": Drawn(dtype, _near(d, rows, cols), full=True),
        "M": Drawn(dtype, (rows, cols), full=True),
        "X": Drawn("f32", _near(d, rows, cols)),
    }
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
    found = d.rng.choice(
        (low, high, 0, 1, 2, 3, 7, 16, -1, -2, -3, -7, low + 1, high - 1, d.rng.randint(low, high))
    )
    return min(max(found, low), high)


def _any(d: TrialPage, dtype: str) -> int:
    """A number that the type may hold or not."""
    low, high = LIMITS[dtype]
    return d.rng.choice((_number(d, dtype), low - 1, high + 1, -low - 1000, -high - 1, 3 * high, -5, 300))


def _said(number: int) -> str:
    return f"({number})" if number < 0 else f"{number}"


def _arithmetic(d: TrialPage, dtype: str) -> None:
    a, b, c = d.pick("n"), d.pick("n"), _said(_number(d, dtype))
    op = d.rng.choice(
        (
            "{} + {}",
            "{} - {}",
            "{} * {}",
            "{} // {}",
            "{} % {}",
            "{} & {}",
            "{} | {}",
            "{} ^ {}",
            "np.maximum({}, {})",
            "np.minimum({}, {})",
            "{} << {}",
            "{} >> {}",
        )
    )
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
    d.new(
        d.rng.choice(
            (
                f"-{a}",
                f"~{a}",
                f"abs({a})",
                f"np.sign({a})",
                f"np.square({a})",
                f"+{a}",
                f"{a} ** {d.rng.choice((0, 1, 2, 3, 5, 9, 12, 100))}",
                f"{a}.copy()",
                f"np.clip({a}, {low}, {high})",
                f"np.clip({a}, {low}, None)",
                f"np.clip({a}, None, {high})",
                f"np.negative({a})",
                f"np.invert({a})",
            )
        ),
        "RCn",
    )


def _compared(d: TrialPage, dtype: str) -> None:
    a, b, c = d.pick("n"), d.pick("n"), _said(_any(d, dtype))
    op = d.rng.choice(("<", "<=", ">", ">=", "==", "!="))
    left, right = d.rng.choice(((a, b), (a, c), (c, a)))
    d.new(f"{left} {op} {right}", "RCb")


def _chosen(d: TrialPage, dtype: str) -> None:
    a, b = d.pick("n"), d.pick("n")
    test = d.rng.choice(
        (
            f"{a} < {_said(_any(d, dtype))}",
            f"{a} > {b}",
            f"{d.pick('e')} > 0.25",
            f"({a} > {b}) & ({b} != {_said(_any(d, dtype))})",
            f"~({a} == {b})",
        )
    )
    d.new(f"np.where({test}, {a}, {d.rng.choice((b, _said(_number(d, dtype)), '-1'))})", "RCn")


def _moved(d: TrialPage, dtype: str) -> None:
    """A load from places around, with or without a number outside."""
    name, kind = d.rng.choice((("N", "n"), ("M", "n"), ("X", "e")))
    up, left = d.rng.choice((-3, -1, 0, 2)), d.rng.choice((-2, -1, 0, 1))
    part = ", ".join(
        f"{x} {'-' if n < 0 else '+'} {abs(n)}:" if n else f"{x}:" for x, n in (("i", up), ("j", left))
    )
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
    with d.block(f"for k in range({d.rng.choice(('3', 'X.shape[1]', '1, 4'))}):"):
        ufunc = d.rng.choice(("add", "subtract", "multiply", "maximum", "bitwise_xor"))
        d.say(
            d.rng.choice(
                (
                    f"{acc} = np.{ufunc}({acc}, {b}, out={acc})",
                    f"np.{ufunc}({acc}, {b}, out={acc})",
                    f"{acc} += group.load(N[i:, j + k:], shape=(R, C), fill=1)",
                    f"{acc} = {acc} * 3 - {b}",
                    f"{acc} = {acc} // 3 + np.{ufunc}({b}, {acc})",
                    f"{acc} = {b} + np.{ufunc}({acc}, {b}, out={acc})",
                )
            )
        )


def _written(d: TrialPage, dtype: str) -> None:
    a, b = d.pick("n"), d.pick("n")
    made = d.new(f"{a}.copy()", "RCn")
    d.say(
        d.rng.choice(
            (
                f"{made}[:] = {b}",
                f"{made}[:, :] = {_number(d, dtype)}",
                f"{made}[:, :] = np.where({b} > {a}, {b}, {_said(_number(d, dtype))})",
            )
        )
    )


def _cast(d: TrialPage, dtype: str) -> None:
    a, b = d.pick("n"), d.pick("bn")
    other, _ = d.rng.choice((("int8", "i8"), ("uint8", "u8"), ("int32", "i32")))
    home = {"i8": "int8", "u8": "uint8", "i32": "int32"}[dtype]
    text = d.rng.choice(
        (
            f"({a}.astype(np.{other}) + 1)",
            f"({a}.astype(np.{other}) // 3)",
            f"{b}.astype(np.{other})",
            f"(-{a}.astype(np.{other}))",
        )
    )
    d.new(f"{text}.astype(np.{home})", "RCn")


def _floated(d: TrialPage, dtype: str) -> None:
    a, e = d.pick("n"), d.pick("e")
    d.new(
        d.rng.choice(
            (
                f"np.where({a} > {_said(_any(d, dtype))}, {e}, 0.5)",
                f"np.maximum({e}, -{e})",
                f"({a} & 3) * 0.25 + {e} * 0.5",
            )
        ),
        "RCe",
    )


OF_INTEGERS: tuple[Callable[[TrialPage, str], None], ...] = (
    _arithmetic,
    _arithmetic,
    _arithmetic,
    _alone,
    _alone,
    _compared,
    _chosen,
    _chosen,
    _moved,
    _moved,
    _gathered,
    _looped,
    _looped,
    _written,
    _cast,
    _floated,
)


SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 20, 33)
DEEPEST = 4  # blocks of items
MOST, MOST_ITEMS = 40, 9  # sizes of the work; the simulator runs items one by one


def draw_trial(seed: int | str, number: int) -> KernelTrial:
    """Trial ``number`` of a seed: the same for everybody."""
    rng = Random(f"transconv kernels {seed} {number}")
    if chance(rng, 9):
        return _of_sub_groups(rng)
    if chance(rng, 4):
        return _of_items(rng)
    return _of_wholes(rng) if chance(rng, 3) else _of_tiles(rng)


def _of_wholes(rng: Random) -> KernelTrial:
    (rows, cols), group = _sizes(rng, 17)
    group = min(group[0], 16), min(group[1], 16)
    page = TrialPage(rng, *group)
    dtype = rng.choice(("i8", "u8", "i8", "u8", "i32"))
    return _trial(rng, (rows, cols), group, wholes(page, rows, cols, dtype), page)


def _sizes(rng: Random, most: int = MOST) -> tuple[tuple[int, int], tuple[int, int]]:
    """The work, and a group of it."""
    group = rng.choice(SIDES), rng.choice(SIDES)
    rows, cols = (max(1, rng.choice((n, 2 * n, rng.randrange(1, 3 * n + 1), n - 1))) for n in group)
    return (min(rows, most), min(cols, most)), group


def _array(rng: Random, work: tuple[int, int], least: int, dtype: str = "f32") -> Drawn:
    """An array about as large as the work."""

    def size(n: int) -> int:
        if chance(rng, 16):
            return rng.choice((least, 1))
        more, less = rng.randrange(4), rng.randrange(4)
        return max(least, rng.choice((n, n, n + more, n + more, n - less)))

    return Drawn(dtype, tuple(size(n) for n in work))


def _of_tiles(rng: Random) -> KernelTrial:
    (rows, cols), (high, wide) = _sizes(rng)
    flat = chance(rng, 4)  # groups of one dimension
    if flat:
        high, rows = min(high, 9), min(high, 9)
    least = 0 if chance(rng, 2) else 1
    arrays = {
        "X": _array(rng, (rows, cols), least),
        "Z": _array(rng, (rows, cols), least),
        "K": _array(rng, (rows, cols), least, rng.choice(("i32", "i32", "i8", "u8", "i64", "bool"))),
        "H": _array(rng, (rows, cols), least, "f16"),
    }
    page = TrialPage(rng, high, wide, least == 0)
    begin(page, flat, arrays["K"].dtype)
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 8))):  # most are short: they compile in less time
        rng.choice(STATEMENTS)(page)
    stored = stores(page, rows, cols)
    return _trial(
        rng, (cols,) if flat else (rows, cols), (wide,) if flat else (high, wide), arrays | stored, page
    )


def _of_items(rng: Random) -> KernelTrial:
    work, group = _sizes(rng, MOST_ITEMS)
    arrays = {"X": _array(rng, work, 1), "Z": _array(rng, work, 1), "K": Drawn("i32", work)}
    page = TrialPage(rng, *group)
    return _trial(rng, work, group, arrays | items(page, *work), page)


def _of_sub_groups(rng: Random) -> KernelTrial:
    sub = rng.choice((1, 2, 4, 8, 16))
    group = sub * rng.choice((1, 2, 3, 4))
    work = min(MOST, max(1, rng.choice((group, 2 * group, rng.randrange(1, 3 * group + 1), group - 1))))
    shape = max(1, work + rng.choice((0, 0, 3, -2)))
    page = TrialPage(rng, 1, sub)
    stored = sub_groups(page, work)
    arrays = {"X": Drawn("f32", (shape,)), "Z": Drawn("f32", (work,))}
    return _trial(rng, (work,), (group,), arrays | stored, page, sub)


def _trial(
    rng: Random,
    work: tuple[int, ...],
    group: tuple[int, ...],
    arrays: dict[str, Drawn],
    page: TrialPage,
    sub: int = 0,
) -> KernelTrial:
    """With the arrays that statements mention."""
    whole = "\n".join(page.lines)
    kept = tuple((n, a) for n, a in arrays.items() if any(f"{n}{c}" in whole for c in "[.,)"))
    return KernelTrial(work, group, rng.randrange(1000), kept, tuple(page.lines), sub)


# -- work-items: numbers, branches in branches, loops, rows of arrays, stores to own elements ----------


def items(d: TrialPage, rows: int, cols: int) -> dict[str, Drawn]:
    """The statements; the arrays they store to. Values of branches end with these."""
    d.say("@group.workitems")
    with d.block("def inner(item):"):
        d.say("i, j = item.global_id()")
        d.say("a, b = item.local_id()")
        with d.block("if i < K.shape[0] and j < K.shape[1]:"):
            for text, kind in (
                ("X[i % X.shape[0], j % X.shape[1]]", "11e"),
                ("K[i, j]", "11i"),
                ("v0 * 0.5 + 1.0", "11f"),
                ("Z[i % Z.shape[0], 0] - v0", "11f"),
            ):
                d.new(text, kind)
            for _ in range(d.rng.randrange(3, 8)):
                _item_statement(d)
            floats = [n for n, k in d.values.items() if k[2] in "fe"][-3:]
            for n, name in enumerate(floats):
                d.say(f"Y[{n}, i, j] = {name}")
            d.say(f"S[i, j] = {d.pick('i')}")
    d.say("inner()")
    return {"Y": Drawn("f32", (len(floats), rows, cols), True), "S": Drawn("i32", (rows, cols), True)}


def _value(d: TrialPage) -> tuple[str, str]:
    """An expression, and its kind."""
    f, g, i = d.pick("fe"), d.pick("fe"), d.pick("i")
    return d.rng.choice(
        (
            (f"{f} + {g} * 0.5", "f"),
            (f"np.maximum({f}, {g})", "f"),
            (f"abs({f})", d.kind(f)),
            (f"{f} / (abs({g}) + 1.5)", "f"),
            (f"np.where({d.pick('ei')} > 0, {f}, {g})", "f"),
            (f"np.clip({f}, -8.0, 8.0) * ({i} % 16) * 0.125", "f"),
            ("X[i % X.shape[0], j % X.shape[1]]", "e"),
            ("Z[i % Z.shape[0]].sum() * 0.125", "f"),
            ("Z[j % Z.shape[0]].max()", "e"),
            (f"(X[i % X.shape[0]] * np.tanh({f})).sum() * 0.125", "f"),
            (f"min({f}, 1.5)", "f"),
            (f"mixed({d.pick('e')}, {d.pick('e')} * 1.0)", "e"),
            (f"np.exp(-abs({f}))", "f"),
            (f"scoped({f}) * 0.25", "f"),
            (f"own({d.pick('e')}, {d.pick('e')} * 1.0)", "f"),
            (f"X[{i} % X.shape[0], {d.pick('i')} % X.shape[1]]", "e"),
        )
    )


def _test(d: TrialPage) -> str:
    e, i = d.pick("e"), d.pick("i")
    return d.rng.choice(
        (
            f"{e} > 0.25",
            f"{i} % 2 == 0",
            f"{e} < 0.5 and {i} > -3",
            f"not {i} > 2",
            "i > j",
            f"a == b or {e} > 1.0",
            "X.shape[0] > 4",
            f"{i} == 1 or {i} >= 3",
        )
    )


def _item_statement(d: TrialPage) -> None:
    kind, outer = d.rng.randrange(7), d.deep == 2
    if kind < 3 or d.deep >= DEEPEST:
        text, found = _value(d)
        if outer:
            d.new(text, f"11{found}")
        else:
            d.say(f"{d.pick('f')} = {text}")
    elif kind == 3 and outer:
        d.new(f"({d.pick('i')} * 3 - {d.pick('i')} // 2 + a) % 64", "11i")
    elif kind in (4, 5):
        _branch(d, f"if {_test(d)}:")
        if chance(d.rng, 2):
            _branch(d, "else:")
    else:
        target = d.pick("f")
        with d.block(f"for k in range({d.rng.choice(('3', 'X.shape[1]', '2, 5'))}):"):
            d.say(f"{target} = {target} * 0.5 + X[i % X.shape[0], k % X.shape[1]]")
            if chance(d.rng, 3):
                with d.block(f"if {_test(d)}:"):
                    d.say(f"{target} = {target} - 0.5")


def _branch(d: TrialPage, head: str) -> None:
    with d.block(head):
        for _ in range(d.rng.randrange(1, 3)):
            _item_statement(d)


# -- sub-groups: vectors of theirs, sums of them, branches and loops, stores to own places -------------


def sub_groups(d: TrialPage, work: int) -> dict[str, Drawn]:
    """The statements; the array they store to."""
    d.say("i, = group.work_offset()")
    d.say("@group.subgroups")
    with d.block("def inner(sg):"):
        d.say("me, n = sg.subgroup_id(), sg.size()")
        d.say("at = i + me * n")
        d.new("group.vload(X[at:], shape=(n,))", "1Ce")
        d.new("group.vload(Z[at:], shape=(n,))", "1Ce")
        d.new("v0 * 0.5 + v1", "1Cf")
        for _ in range(d.rng.randrange(1, 6)):
            _sub_group_statement(d)
        found = [*d.values][-2:]
        for n, name in enumerate(found):
            d.say(f"group.store(Y[{n}, at:], {name})")
    d.say("inner()")
    return {"Y": Drawn("f32", (len(found), work), True)}


def _sub_group_statement(d: TrialPage) -> None:
    f, g, e = d.pick("fe"), d.pick("fe"), d.pick("e")
    kind = d.rng.randrange(4)
    if kind < 2:
        text, found = d.rng.choice(
            (
                (f"{f} + {g} * 0.5", "f"),
                (f"np.maximum({f}, {g})", "f"),
                (f"{f} / (abs({g}) + 1.5)", "f"),
                (f"np.where({e} > 0.25, {f}, {g})", "f"),
                (f"{f} + {g}.sum() * 0.125", "f"),
                (f"{f} - {e}.max()", "f"),
                (f"scoped({f})", "f"),
                (f"own({e}, {d.pick('e')})", "f"),
                (f"np.where({e}.mask, 2.0, {f})", "f"),
                ("group.vload(X[at + me:], shape=(n,))", "e"),
                (f"np.clip({f}, -4.0, 4.0) + group.vfull((n,), np.float32, 0.5)", "f"),
                (f"{f} * (me + 1) + i % 3", "f"),
                (f"np.exp(-abs({f}))", "f"),
            )
        )
        d.new(text, f"1C{found}")
        return
    target = d.pick("f")
    head = d.rng.choice(
        ("if me > 0:", "if me % 2 == 0:", "if at + 2 < X.shape[0]:", "if i > 0:")
        if kind == 2
        else ("for k in range(3):", "for k in range(me + 1):")
    )
    with d.block(head):
        more = f"group.vload(Z[at + {'k' if kind == 3 else '1'}:], shape=(n,))"
        d.say(
            f"{target} = "
            + d.rng.choice(
                (f"{target} * 0.5 + {more}", f"{target} + 1.0", f"np.minimum({target}, {more})")
            )
        )
    if kind == 2 and chance(d.rng, 2):
        with d.block("else:"):
            d.say(f"{target} = {target} * 0.25")


# -- the kind of trials --------------------------------------------------------------------------------

KERNELS = TrialKind(
    "kernels",
    lambda seed, number, target: draw_trial(seed, number),
    KernelTrial.parse,
    "transconv.kernel.trials.draw:work",
)


def work(*args: Any, **asked: Any) -> Row:
    """``run_trial`` of a kernel."""
    return run_trial(KERNELS, *args, **asked)
