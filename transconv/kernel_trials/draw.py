"""Draws a kernel: statements over tiles, or a body of work-items.

Comparisons and indices are of exact values alone, so that engines that round otherwise decide alike, and
values stay small, so that roundings do. Arrays are empty, smaller and larger than tiles; groups reach
beyond the work.
"""

from __future__ import annotations

from random import Random
from typing import Any

from transconv.kernel_trials.draw_integers import wholes
from transconv.kernel_trials.draw_tiles import STATEMENTS, TrialPage, begin, stores
from transconv.kernel_trials.trial import Drawn, KernelTrial
from transconv.verify.draw.conv_problems import chance
from transconv.verify.fuzz.trial import Row, TrialKind
from transconv.verify.fuzz.trial_run import run_trial

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
    arrays = {"X": _array(rng, (rows, cols), least), "Z": _array(rng, (rows, cols), least),
              "K": _array(rng, (rows, cols), least, rng.choice(("i32", "i32", "i8", "u8", "i64", "bool"))),
              "H": _array(rng, (rows, cols), least, "f16")}
    page = TrialPage(rng, high, wide, least == 0)
    begin(page, flat, arrays["K"].dtype)
    for _ in range(rng.choice((1, 2, 2, 3, 3, 4, 5, 8))):  # most are short: they compile in less time
        rng.choice(STATEMENTS)(page)
    stored = stores(page, rows, cols)
    return _trial(rng, (cols,) if flat else (rows, cols), (wide,) if flat else (high, wide),
                  arrays | stored, page)


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


def _trial(rng: Random, work: tuple[int, ...], group: tuple[int, ...], arrays: dict[str, Drawn],
           page: TrialPage, sub: int = 0) -> KernelTrial:
    """With the arrays that statements mention."""
    whole = "\n".join(page.lines)
    kept = tuple((n, a) for n, a in arrays.items() if any(f"{n}{c}" in whole for c in "[.,)"))
    return KernelTrial(work, group, rng.randrange(1000), kept, tuple(page.lines), sub)


# -- work-items: numbers, branches in branches, loops, rows of arrays, stores to own elements ----------


def items(d: TrialPage, rows: int, cols: int) -> dict[str, Drawn]:
    """The statements; the arrays they store to. Values of branches end with these."""
    d.say("@group.workitems")
    d.say("def inner(item):")
    d.deep = 1
    d.say("i, j = item.global_id()")
    d.say("a, b = item.local_id()")
    d.say("if i < K.shape[0] and j < K.shape[1]:")
    d.deep = 2
    for text, kind in (("X[i % X.shape[0], j % X.shape[1]]", "11e"), ("K[i, j]", "11i"),
                       ("v0 * 0.5 + 1.0", "11f"), ("Z[i % Z.shape[0], 0] - v0", "11f")):
        d.new(text, kind)
    for _ in range(d.rng.randrange(3, 8)):
        _item_statement(d)
    floats = [n for n, k in d.values.items() if k[2] in "fe"][-3:]
    for n, name in enumerate(floats):
        d.say(f"Y[{n}, i, j] = {name}")
    d.say(f"S[i, j] = {d.pick('i')}")
    d.deep = 0
    d.say("inner()")
    return {"Y": Drawn("f32", (len(floats), rows, cols), True), "S": Drawn("i32", (rows, cols), True)}


def _value(d: TrialPage) -> tuple[str, str]:
    """An expression, and its kind."""
    f, g, i = d.pick("fe"), d.pick("fe"), d.pick("i")
    return d.rng.choice((
        (f"{f} + {g} * 0.5", "f"), (f"np.maximum({f}, {g})", "f"), (f"abs({f})", d.kind(f)),
        (f"{f} / (abs({g}) + 1.5)", "f"), (f"np.where({d.pick('ei')} > 0, {f}, {g})", "f"),
        (f"np.clip({f}, -8.0, 8.0) * ({i} % 16) * 0.125", "f"), ("X[i % X.shape[0], j % X.shape[1]]", "e"),
        ("Z[i % Z.shape[0]].sum() * 0.125", "f"), ("Z[j % Z.shape[0]].max()", "e"),
        (f"(X[i % X.shape[0]] * np.tanh({f})).sum() * 0.125", "f"), (f"min({f}, 1.5)", "f"),
        (f"mixed({d.pick('e')}, {d.pick('e')} * 1.0)", "e"), (f"np.exp(-abs({f}))", "f"),
        (f"scoped({f}) * 0.25", "f"), (f"own({d.pick('e')}, {d.pick('e')} * 1.0)", "f"),
        (f"X[{i} % X.shape[0], {d.pick('i')} % X.shape[1]]", "e")))


def _test(d: TrialPage) -> str:
    e, i = d.pick("e"), d.pick("i")
    return d.rng.choice((f"{e} > 0.25", f"{i} % 2 == 0", f"{e} < 0.5 and {i} > -3", f"not {i} > 2",
                         "i > j", f"a == b or {e} > 1.0", "X.shape[0] > 4", f"{i} == 1 or {i} >= 3"))


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
        d.say(f"if {_test(d)}:")
        _inside(d)
        if chance(d.rng, 2):
            d.say("else:")
            _inside(d)
    else:
        target = d.pick("f")
        d.say(f"for k in range({d.rng.choice(('3', 'X.shape[1]', '2, 5'))}):")
        d.deep += 1
        d.say(f"{target} = {target} * 0.5 + X[i % X.shape[0], k % X.shape[1]]")
        if chance(d.rng, 3):
            d.say(f"if {_test(d)}:")
            d.deep += 1
            d.say(f"{target} = {target} - 0.5")
            d.deep -= 1
        d.deep -= 1


def _inside(d: TrialPage) -> None:
    d.deep += 1
    for _ in range(d.rng.randrange(1, 3)):
        _item_statement(d)
    d.deep -= 1


# -- sub-groups: vectors of theirs, sums of them, branches and loops, stores to own places -------------


def sub_groups(d: TrialPage, work: int) -> dict[str, Drawn]:
    """The statements; the array they store to."""
    d.say("i, = group.work_offset()")
    d.say("@group.subgroups")
    d.say("def inner(sg):")
    d.deep = 1
    d.say("me, n = sg.subgroup_id(), sg.size()")
    d.say("at = i + me * n")
    d.new("group.vload(X[at:], shape=(n,))", "1Ce")
    d.new("group.vload(Z[at:], shape=(n,))", "1Ce")
    d.new("v0 * 0.5 + v1", "1Cf")
    for _ in range(d.rng.randrange(1, 6)):
        _sub_group_statement(d)
    found = [n for n in d.values][-2:]
    for n, name in enumerate(found):
        d.say(f"group.store(Y[{n}, at:], {name})")
    d.deep = 0
    d.say("inner()")
    return {"Y": Drawn("f32", (len(found), work), True)}


def _sub_group_statement(d: TrialPage) -> None:
    f, g, e = d.pick("fe"), d.pick("fe"), d.pick("e")
    kind = d.rng.randrange(4)
    if kind < 2:
        text, found = d.rng.choice((
            (f"{f} + {g} * 0.5", "f"), (f"np.maximum({f}, {g})", "f"), (f"{f} / (abs({g}) + 1.5)", "f"),
            (f"np.where({e} > 0.25, {f}, {g})", "f"), (f"{f} + {g}.sum() * 0.125", "f"),
            (f"{f} - {e}.max()", "f"), (f"scoped({f})", "f"), (f"own({e}, {d.pick('e')})", "f"),
            (f"np.where({e}.mask, 2.0, {f})", "f"), ("group.vload(X[at + me:], shape=(n,))", "e"),
            (f"np.clip({f}, -4.0, 4.0) + group.vfull((n,), np.float32, 0.5)", "f"),
            (f"{f} * (me + 1) + i % 3", "f"), (f"np.exp(-abs({f}))", "f")))
        d.new(text, f"1C{found}")
        return
    target = d.pick("f")
    head = d.rng.choice(("if me > 0:", "if me % 2 == 0:", "if at + 2 < X.shape[0]:", "if i > 0:")
                        if kind == 2 else ("for k in range(3):", "for k in range(me + 1):"))
    d.say(head)
    d.deep += 1
    more = f"group.vload(Z[at + {'k' if kind == 3 else '1'}:], shape=(n,))"
    d.say(f"{target} = " + d.rng.choice((f"{target} * 0.5 + {more}", f"{target} + 1.0",
                                         f"np.minimum({target}, {more})")))
    d.deep -= 1
    if kind == 2 and chance(d.rng, 2):
        d.say("else:")
        d.deep += 1
        d.say(f"{target} = {target} * 0.25")
        d.deep -= 1


# -- the kind of trials --------------------------------------------------------------------------------

KERNELS = TrialKind("kernels", lambda seed, number, target: draw_trial(seed, number), KernelTrial.parse,
                    "transconv.kernel_trials.draw:work")


def work(*args: Any, **asked: Any) -> Row:
    """``run_trial`` of a kernel."""
    return run_trial(KERNELS, *args, **asked)
