"""Bodies of sub-groups: vectors of theirs, sums of them, branches and loops, stores to own places."""

from __future__ import annotations

from transconv.kernel_trials.page import TrialPage
from transconv.kernel_trials.trial import Drawn
from transconv.verify.draw.conv_problems import chance


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
        _statement(d)
    found = [n for n in d.values][-2:]
    for n, name in enumerate(found):
        d.say(f"group.store(Y[{n}, at:], {name})")
    d.deep = 0
    d.say("inner()")
    return {"Y": Drawn("f32", (len(found), work), True)}


def _statement(d: TrialPage) -> None:
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
