"""Statements over tiles, and the page that they are drawn on: arithmetic, masks, reductions, gathers,
loops, branches, products, stores."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from transconv.kernel.trials.trial import Drawn
from transconv.verify.fuzz.trial import chance


@dataclass
class TrialPage:
    """The page that statements are drawn on. ``values``: names with a shape, ``RC``, ``R1`` or ``1C``, and
    a kind: ``f`` a float that engines may round otherwise, ``e`` an exact one, ``h`` an exact one of 16
    bits, ``i`` an integer, ``n`` one of the narrow type, ``b`` a boolean. ``rows``, ``cols``: the sizes of
    a tile; ``empty``: whether arrays may have no elements."""

    rng: Random
    rows: int
    cols: int
    empty: bool = False
    values: dict[str, str] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    deep: int = 0

    def say(self, text: str) -> None:
        """Append a statement."""
        self.lines.append(f"{'>' * self.deep} {text}".lstrip())

    @contextmanager
    def block(self, head: str) -> Iterator[None]:
        """The statements of a loop, a branch or a function are said within ``with``."""
        self.say(head)
        self.deep += 1
        yield
        self.deep -= 1

    def new(self, text: str, kind: str) -> str:
        """A name for a value."""
        name = f"v{len(self.values)}"
        self.say(f"{name} = {text}")
        self.values[name] = kind
        return name

    def pick(self, kinds: str = "fei", shape: str = "") -> str:
        """The name of a value of one of some kinds; the latest are likelier."""
        found = [n for n, k in self.values.items() if k[2] in kinds and k.startswith(shape)]
        return found[-1] if chance(self.rng, 3) else self.rng.choice(found)

    def kind(self, name: str) -> str:
        """The kind of a value, a letter."""
        return self.values[name][2]

    def shape(self, *names: str) -> str:
        """The shape of values that are combined."""
        rows = "R" if any(self.values[n][0] == "R" for n in names) else "1"
        return rows + ("C" if any(self.values[n][1] == "C" for n in names) else "1")

    @property
    def small(self) -> bool:
        """Whether tiles of three dimensions stay small."""
        return self.rows <= 9 and self.cols <= 9


def begin(d: TrialPage, flat: bool, whole: str) -> None:
    """Where the group is, and the first values."""
    if flat:
        d.say("j, = group.work_offset()")
        d.say(f"i, R, C = 0, {d.rows}, group.shape[0]")
    else:
        d.say("i, j = group.work_offset()")
        d.say("R, C = group.shape")
    d.new("group.load(X[i:, j:], shape=(R, C))", "RCe")
    d.new(f"group.{'v' if chance(d.rng, 4) else ''}load(Z[i:, j:], shape=(R, C))", "RCe")
    d.new("group.load(K[i:, j:], shape=(R, C))" + ".astype(np.int32)" * (whole != "i32"), "RCi")
    d.new("v0 * 0.5 + v1", "RCf")


def _two(d: TrialPage) -> None:
    a, b = d.pick("fe"), d.pick("fe")
    op = d.rng.choice(
        (
            "{} + {}",
            "{} - {} * 0.5",
            "np.clip({}, -8.0, 8.0) * np.tanh({})",
            "np.maximum({}, {})",
            "np.minimum({}, {})",
            "{} / (abs({}) + 1.5)",
            "mixed({}, {} * 1.0)",
        )
    )
    exact = op[:8] in ("np.maxim", "np.minim") and d.kind(a) == d.kind(b) == "e"
    if op.startswith("mixed") and {d.kind(a), d.kind(b)} != {"e"}:
        op = "{} * 0.5 + {}"
    d.new(op.format(a, b), d.shape(a, b) + ("e" if exact or op.startswith("mixed") else "f"))


def _one(d: TrialPage) -> None:
    a = d.pick("fe")
    op, exact = d.rng.choice(
        (
            ("-{}", True),
            ("abs({})", True),
            ("np.exp(-abs({}))", False),
            ("np.clip({}, -1.0, 1.5)", True),
            ("np.clip({}, -4.0, 4.0)**2 * 0.25", False),
            ("np.sqrt(abs({}) + 0.25)", False),
            ("{}.copy()", True),
            ("np.log(abs({}) + 1.0)", False),
            ("np.sin({})", False),
        )
    )
    d.new(op.format(a), d.shape(a) + (d.kind(a) if exact else "f"))


def _rounded(d: TrialPage) -> None:
    a = d.pick("e")
    text, kind = d.rng.choice(
        (
            (f"np.floor({a})", "e"),
            (f"np.rint({a} * 2.0)", "e"),
            (f"{a}.astype(np.int32)", "i"),
            (f"{a} > {d.pick('e', 'RC')}", "b"),
            (f"({a} < 0.5) | ({a} == 1.0)", "b"),
            (f"np.ceil({a}).astype(np.int8)", "i"),
        )
    )
    names = [n for n in d.values if n in re.findall(r"v\d+", text)]
    made = d.new(text, d.shape(*names) + kind)
    if text.endswith("int8)"):
        d.say(f"{made} = {made}.astype(np.int32)")


def _half(d: TrialPage) -> None:
    """A value of 16 bits, in which nothing is rounded."""
    made = d.new("group.load(H[i:, j:], shape=(R, C))", "RCh")
    text = d.rng.choice(
        (
            "{}.astype(np.float32)",
            "np.maximum({}, {}).astype(np.float32)",
            "{}.max(axis=1, keepdims=True).astype(np.float32)",
            "np.where({} > 0, {}, -1.0).astype(np.float32)",
            "{} + group.zeros(shape=(R, C))",
            "({} * 2.0).astype(np.float32)",
        )
    )
    d.new(text.replace("{}", made), ("R1" if "axis" in text else "RC") + "e")


def _whole(d: TrialPage) -> None:
    a, b = d.pick("i"), d.pick("i")
    op = d.rng.choice(
        (
            "({} + {}) % 64",
            "({} * 3 - {}) % 64",
            "np.minimum({}, {})",
            "{} // 3 + {} % 5",
            "({} & 7) | ({} & 3)",
            "({} ^ {}) & 31",
            "~{} + ({} >> 1)",
            "({} & 3) << ({} & 2)",
        )
    )
    d.new(op.format(a, b), d.shape(a, b) + "i")


def _placed(d: TrialPage) -> None:
    """Numbers that positions tell."""
    text = d.rng.choice(
        (
            "j + np.arange(C)[None]",
            "(i + np.arange(R))[:, None]",
            "np.arange(R)[:, None] * 2 - np.arange(C)",
        )
    )
    d.new(f"({text}).astype(np.int32) + group.zeros(shape=(R, C), dtype=np.int32)", "RCi")


def _chosen(d: TrialPage) -> None:
    test, other, a, b = d.pick("ei"), d.pick("ei"), d.pick("fe"), d.pick("fe")
    text, used = d.rng.choice(
        (
            (f"np.where({test} > {d.rng.choice((-1, 0, 1))}, {a}, {b})", (test, a, b)),
            (f"np.where({test}.mask, 2.0, {a})", (test, a)),
            (f"np.where(~{test}.mask & ({other} >= 1), {a}, 0.5)", (test, other, a)),
            (f"np.where(({test} < 0) & ({other} >= 1), {a}, 0.5)", (test, other, a)),
        )
    )
    exact = all(d.kind(n) in "ei" for n in used) and {d.kind(n) for n in used[1:]} <= {"e"}
    d.new(text, d.shape(*used) + ("e" if exact and "mask, " not in text else "f"))


def _reduced(d: TrialPage) -> None:
    a = d.pick("feib")
    axis, kind = d.rng.choice((0, 1)), d.kind(a)
    ops = {"b": ("any", "all", "sum"), "i": ("max", "min", "sum")}.get(kind, ("max", "min", "sum", "mean"))
    op = d.rng.choice(ops)
    left = ("1" + d.values[a][1], d.values[a][0] + "1")[axis]
    text = f"{a}.{op}(axis={axis}, keepdims=True)"
    if chance(d.rng, 3):
        text = f"np.{op}({a}, axis={axis}){'[:, None]' if axis else '[None]'}"
    if kind in "fe" and op in ("sum", "mean"):
        d.new(f"np.clip({text}{' * 0.125' if op == 'sum' else ''}, -8.0, 8.0)", left + "f")
    elif (kind == "i" and op == "sum") or (op in ("any", "all", "sum") and kind == "b"):
        d.new(f"{text}.astype(np.int32) % 64", left + "i")
    else:
        d.new(text, left + kind)


def _folded(d: TrialPage) -> None:
    """A reduction of everything, or of a tile of three dimensions."""
    a, b = d.pick("fe", "RC"), d.pick("fe", "RC")
    if not d.small or chance(d.rng, 3):
        op = d.rng.choice(("max()", "min()"))
        d.new(f"{a}.{op} + {b} * 0.5", "RCf")
    elif chance(d.rng, 2):
        total = f"({a}[:, :, None] * np.tanh({b}[:, None, :])).sum(axis=2)"
        d.new(f"np.clip({total} * 0.125, -8.0, 8.0)", "RCf")
    else:
        d.new(f"abs({a}[:, None] - {b}[None]).max(axis=(0, 2))[:, None]", "R1f")


def _counted(d: TrialPage) -> None:
    a, axis = d.pick("ie", "RC"), d.rng.choice((0, 1))
    op = d.rng.choice(("argmax", "argmin"))
    end = "[:, None]" if axis else "[None]"
    d.new(f"{a}.{op}(axis={axis}){end}.astype(np.int32)", ("R1" if axis else "1C") + "i")


def _moved(d: TrialPage) -> None:
    step = d.rng.randrange(4)
    part = d.rng.choice(
        (
            f"X[i + {step}:, j:]",
            f"Z[i:, {step}:]",
            f"X[{step}::2, j:]",
            f"X[:, j:{step}]",
            f"Z[-{step + 1}:, j:]",
            f"Z[i:-{step + 1}, j:]",
        )
    )
    d.new(f"group.load({part}, shape=(R, C))", "RCe")


def _gathered(d: TrialPage) -> None:
    a, b = d.pick("i", "RC"), d.pick("i")
    at = d.rng.choice((f"{a}, {b}", f"abs({a}), abs({b})", f"{a} - 2, {b} % 3"))
    d.new(f"{d.rng.choice('XZ')}[{at}]", "RCe")


def _cut(d: TrialPage) -> None:
    """A row, a column, or an element of an array, with everything."""
    a, b = d.pick("fe", "RC"), d.pick("fe")
    if chance(d.rng, 3) and not d.empty:
        d.new(f"X[i, 0] * 0.5 + {a}", "RCf")
        return
    part = d.rng.choice(
        (f"{a}[0][None]", f"{a}[-1]", f"{a}[:, 0][:, None]", f"{a}[:, -1][:, None]", f"{a}.T.T")
    )
    rows = "R" if d.values[b][0] == "R" or "T" in part or "[:, " in part else "1"
    cols = "C" if d.values[b][1] == "C" or "[:, " not in part else "1"
    d.new(f"{part} * 0.5 + {b}", f"{rows}{cols}f")


def _written(d: TrialPage) -> None:
    a, b = d.pick("fe", "RC"), d.pick("fe")
    if chance(d.rng, 3):
        made = d.new("group.empty(shape=(R, C), dtype=np.float32)", "RCe")
        kind = "e"
    else:
        kind = d.kind(a)
        made = d.new(f"{a}.copy()", "RC" + kind)
    part = d.rng.choice(
        (
            "[0] = 1.5",
            "[:, 0] = -2.0",
            f"[:] = {b}",
            "[R // 2:, 1:] = 0.5",
            "[-1] = 3.0",
            f"[:, :] = np.where({d.pick('ei')} > 0, {b}, 1.0)",
        )
    )
    d.say(f"{made}{part}")
    if b in part:
        kind = "f"
    if chance(d.rng, 4):
        d.say(f"np.add({made}, {b}, out={made})")
        kind = "f"
    d.values[made] = "RC" + kind


def _looped(d: TrialPage) -> None:
    a, b = d.pick("f", "RC"), d.pick("fe")
    acc = d.new(f"{a} * 1.0", "RCf")
    trips = d.rng.choice(
        ("3", "X.shape[1] // 3", "i + 1", "1, 6, 2", "j, j + 2", "i", "j // 2", "i, X.shape[0], 3")
    )
    with d.block(f"for k in range({trips}):"):
        d.say(f"{acc} = {acc} * 0.5 + {b}")
        kind = d.rng.randrange(4)
        if kind == 0:
            with d.block(f"if k {d.rng.choice(('== 1', '> i', '% 2 == 0'))}:"):
                d.say(f"{acc} -= group.load(X[i + k:, j:], shape=(R, C))")
        elif kind == 1:
            d.say(f"{acc} += group.load(Z[i:, k:], shape=(R, C)) * 0.25")
        elif kind == 2:
            d.say(f"{acc} = np.maximum({acc}, group.load(X[k, j:], shape=(C,)))")
        elif d.small:
            with d.block("for m in range(2):"):
                d.say(f"{acc} = {acc} * 0.5 + group.load(X[i + m:, j + k:], shape=(R, C))")


def _summed(d: TrialPage) -> None:
    """A sum over a loop, which may have no iteration; what begins it is active everywhere."""
    acc = d.new(
        d.rng.choice(
            (
                "group.zeros(shape=(R, C), dtype=np.float32)",
                "group.full(shape=(R, C), dtype=np.float32, fill_value=0.5)",
            )
        ),
        "RCf",
    )
    with d.block(f"for k in range({d.rng.choice(('i', 'j', 'j // 2', '3', 'i, X.shape[0], 3'))}):"):
        d.say(
            f"{acc} "
            + d.rng.choice(
                (
                    f"+= np.tanh({d.pick('fe')})",
                    "+= group.load(X[i:, j:], shape=(R, C)) * 0.125",
                    "-= group.load(Z[i:, k:], shape=(R, C)) * 0.125",
                )
            )
        )


def _branched(d: TrialPage) -> None:
    a, b = d.pick("fe", "RC"), d.pick("fe", "RC")
    test = d.rng.choice(("i > 0", "j == 0", "i + j > 3 and j > 0", "not i > 2", "group.id()[0] % 2 == 0"))
    made = d.new(f"{a} * 1.0", "RCf")
    with d.block(f"if {test}:"):
        load = d.rng.choice(
            ("group.load(X[i:, j:], shape=(R, C))", "group.load(Z[i + 1:, j:], shape=(R, C))")
        )
        d.say(
            f"{made} "
            + d.rng.choice(
                (
                    f"= {b} + 1.0",
                    "*= 0.5",
                    f"= np.minimum({made}, {b})",
                    f"= {load}",
                    f"= {made} * 0.5 + {load}",
                )
            )
        )
    if chance(d.rng, 2):
        with d.block("else:"):
            d.say(f"{made} -= group.load(Z[i:, j:], shape=(R, C))")


def _multiplied(d: TrialPage) -> None:
    a, b, c = d.pick("fe", "RC"), d.pick("fe", "RC"), d.pick("fe", "RC")
    if chance(d.rng, 3):  # in 16 bits, of which sums of products are exact
        h = d.new("group.load(H[i:, j:], shape=(R, C))", "RCh")
        k = d.new(f"np.minimum({h}, group.full(shape=(R, C), dtype=np.float16, fill_value=1.0))", "RCh")
        d.new(f"np.clip(({h} @ {k}.T).max(axis=1, keepdims=True) * 0.125 + {c}, -8.0, 8.0)", "RCf")
    elif chance(d.rng, 2):
        acc = d.new("group.zeros(shape=(R, R), dtype=np.float32)", "RRf")
        with d.block(f"for k in range(0, {d.rng.choice(('X.shape[1]', '2 * C'))}, C):"):
            d.say(f"{acc} += {a} @ group.load(X[i:, k:], shape=(R, C)).T")
        del d.values[acc]
        d.values[acc] = "XXx"
        d.new(f"np.clip({acc} @ {c} * 0.0625, -8.0, 8.0)", "RCf")
    else:
        d.new(f"np.clip((({a} + 0.5) @ ({b} - 1.0).T) @ {c} * 0.0625, -8.0, 8.0)", "RCf")


def _mapped(d: TrialPage) -> None:
    """A view from a function of the indices of an element."""
    there = d.rng.choice(
        (
            "i + a, j + b + 1",
            "i + a // 2, j + b - 1",
            "(a + b) % 5, j + b",
            "i + a, (j + b * 2) % 7",
            "a * 2 - 1, b - a",
        )
    )
    view = f"create_mapping(lambda a, b: ({there}))"
    d.new(f"group.load({d.rng.choice('XZ')}, shape=(R, C), mapping={view})", "RCe")


def _added(d: TrialPage) -> None:
    """Additions to elements that other groups add to, of exact numbers, whose order does not matter."""
    a = d.pick("i", "RC")
    d.say(
        d.rng.choice(
            (
                f"atomic_ref(W)[abs({a}) % 13] += {d.pick('e', 'RC')}",
                f"atomic_ref(W)[{a}] += 1.0",
                f"atomic_ref(W)[j:] += {d.pick('e', 'RC')}[0]",
                "atomic_ref(W)[0] -= group.load(X[i:, j:], shape=(R, C)).sum()",
            )
        )
    )


def _called(d: TrialPage) -> None:
    """A function of its own in the text, or one with a body for the scope."""
    a, b = d.pick("e"), d.pick("e")
    if chance(d.rng, 2):
        d.new(f"own({a}, {b})", d.shape(a, b) + "f")
    else:
        f = d.pick("fe")
        d.new(f"scoped({f})", d.shape(f) + "f")


STATEMENTS = (
    _two,
    _two,
    _one,
    _rounded,
    _half,
    _whole,
    _placed,
    _chosen,
    _chosen,
    _reduced,
    _reduced,
    _folded,
    _counted,
    _moved,
    _gathered,
    _cut,
    _written,
    _looped,
    _summed,
    _branched,
    _branched,
    _multiplied,
    _multiplied,
    _mapped,
    _added,
    _called,
)


def stores(d: TrialPage, rows: int, cols: int) -> dict[str, Drawn]:
    """Statements that store the last values; the arrays they are stored to."""
    found = [n for n, k in d.values.items() if k[2] in "fe"][-3:]
    for n, name in enumerate(found):
        value = name if d.values[name][:2] == "RC" else f"{name} + group.zeros(shape=(R, C))"
        if n == 0 and chance(d.rng, 4):
            d.say("if i >= 0:")
            d.deep += 1
        d.say(f"group.store(Y[{n}, i:, j:], {value})")
        d.deep = 0
    made = {"Y": Drawn("f32", (len(found), rows, cols), True)}
    if any("atomic_ref(W)" in line for line in d.lines):
        made["W"] = Drawn("f32", (d.rng.choice((13, 13, 5, cols + 1)),), True)
    if chance(d.rng, 2):
        d.say(f"group.store(S[i:, j:], {d.pick('i')} + group.zeros(shape=(R, C), dtype=np.int32))")
        made["S"] = Drawn("i32", (rows, cols), True)
    if chance(d.rng, 4):
        d.say(f"group.store(T[j:, i:], {d.pick('fe', 'RC')}.T)")
        fewer = d.rng.randrange(3)
        made["T"] = Drawn("f32", (max(0, cols - fewer), max(0, rows - fewer)), True)
    return made
