"""Bodies of work-items: numbers, branches in branches, loops, rows of arrays, stores to own elements."""

from __future__ import annotations

from transconv.kernel_trials.page import TrialPage
from transconv.kernel_trials.trial import Drawn
from transconv.verify.draw.conv_problems import chance

DEEPEST = 4  # blocks


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
        _statement(d)
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


def _statement(d: TrialPage) -> None:
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
        _statement(d)
    d.deep -= 1
