"""The pass ``quads``: products of bytes, four at a time (sums of integers in registers).

    acc_0 = acc_0 + i32(a_0) * i32(b_0)             x_0 = bytes_of_4(a_0, a_1, a_2, a_3)
    acc_1 = acc_1 + i32(a_1) * i32(b_0)             x_4 = bytes_of_1(a_4)
    acc_0 = acc_0 + i32(a_1) * i32(b_1)     ->      x_1 = bytes_from_1(x_0, x_4)
    ...                                             y_0 = bytes_of_4(b_0, b_1, b_2, b_3)
    acc_1 = acc_1 + i32(a_4) * i32(b_3)             acc_0 = products_of_i8_i8(x_0, y_0, acc_0)
                                                    acc_1 = products_of_i8_i8(x_1, y_0, acc_1)

A product is that of two words. A window that slides over a row multiplies its elements in their order:
every fourth word is made of bytes, the others of two words that follow one another. Where fewer than four
products are left, the word of the window has zeros, and the other one whatever follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise

from transconv import ir
from transconv.compute import Compute
from transconv.passes.scope import VariableNames
from transconv.schedule import QUAD, Schedule, has_quads
from transconv.target import Target

FEWEST = 3  # products of a row, for which words take fewer operations

Pair = tuple[ir.Var, ir.Var]


def quads(kernel: ir.Kernel, schedule: Schedule, compute: Compute, target: Target) -> ir.Kernel:
    """Multiply bytes four at a time where chip and tile allow it."""
    if not has_quads(schedule, compute, target):
        return kernel
    names = VariableNames(kernel)
    return _Quads(ir.Var(names.fresh(f"word_{n}"), ir.i32) for n in count()).rebuilt(kernel)


class _Quads(ir.Mutator):
    def __init__(self, new: Iterator[ir.Var]) -> None:
        self.new = new

    def mutate_Seq(self, at: ir.Seq) -> ir.Stmt:
        done: list[ir.Stmt] = []
        run: list[tuple[ir.Var, Pair]] = []
        for s in [*map(self.mutate, at.stmts), None]:
            if isinstance(s, ir.Update) and (pair := _product(s)) is not None:
                run.append((s.var, pair))
                continue
            if isinstance(s, ir.Let) and not ir.free_vars(s.value) & {acc for acc, _ in run}:
                done.append(s)  # what is multiplied later may be loaded meanwhile
                continue
            done += _multiplied(run, self.new)
            run = []
            done += [s] if isinstance(s, ir.Stmt) else []
        return ir.seq(*done)


def _product(s: ir.Update) -> Pair | None:
    """The bytes that a statement multiplies and adds to its variable; None for other statements."""
    if s.var.type is not ir.i32 or not isinstance(s.value, ir.Add) or s.value.a != s.var:
        return None
    product = s.value.b
    found = (
        [
            x.x
            for x in (product.a, product.b)
            if isinstance(x, ir.Cast) and isinstance(x.x, ir.Var) and x.x.type in (ir.i8, ir.u8)
        ]
        if isinstance(product, ir.Mul)
        else []
    )
    return (found[0], found[1]) if len(found) == 2 else None


def _multiplied(run: list[tuple[ir.Var, Pair]], new: Iterator[ir.Var]) -> Iterator[ir.Stmt]:
    """The statements of a run of products and sums; ``new``: variables for words."""
    of: dict[ir.Var, list[Pair]] = {}
    for acc, pair in run:
        of.setdefault(acc, []).append(pair)
    words = _Words(new, [[a for a, _ in pairs] for pairs in of.values()])
    rows = {acc: list(words.rows(pairs)) for acc, pairs in of.items()}
    for turn in range(max(map(len, rows.values()), default=0)):
        for acc, each in rows.items():
            if turn >= len(each):
                continue
            lefts, rights = zip(*each[turn], strict=True)
            if len(rows[acc]) == 1 and len(lefts) < FEWEST:
                yield from (
                    ir.Update(acc, acc + ir.Cast(a, ir.i32) * ir.Cast(b, ir.i32)) for a, b in each[turn]
                )
                continue
            yield from words.from_place(lefts[0])
            yield from words.made(rights)
            left, right = words.of_place[lefts[0]], words.of_bytes[rights]
            yield ir.Update(acc, ir.Call(ir.PRODUCTS[lefts[0].type, rights[0].type], (left, right, acc)))


class _Words:
    """The words of a run, each made where it is first multiplied. ``new``: variables for them; ``lefts``:
    the elements that each sum multiplies."""

    def __init__(self, new: Iterator[ir.Var], lefts: list[list[ir.Var]]) -> None:
        self.new = new
        self.of_bytes: dict[tuple[ir.Var, ...], ir.Var] = {}
        self.of_place: dict[ir.Var, ir.Var] = {}
        self.place: dict[ir.Var, tuple[list[ir.Var], int]] = {}
        for row in _rows(lefts):
            self.place |= {x: (row, i) for i, x in enumerate(row)}

    def rows(self, pairs: list[Pair]) -> Iterator[list[Pair]]:
        """The products of a sum in groups of at most four, whose elements follow one another in a row."""
        group: list[Pair] = []
        for pair in pairs:
            if group:
                row, at = self.place[group[-1][0]]
                follows = row[at + 1 : at + 2] == [pair[0]] and pair[1].type is group[0][1].type
                if len(group) == QUAD or not follows:
                    yield group
                    group = []
            group.append(pair)
        yield group

    def made(self, numbers: tuple[ir.Var, ...]) -> Iterator[ir.Stmt]:
        """The statement that makes a word of bytes, if none has made it."""
        if numbers not in self.of_bytes:
            self.of_bytes[numbers] = next(self.new)
            yield ir.Let(self.of_bytes[numbers], ir.Call(ir.BYTES[len(numbers)], numbers))

    def from_place(self, first: ir.Var) -> Iterator[ir.Stmt]:
        """The statements that make the word from an element of a row on, if none have made it."""
        if first in self.of_place:
            return
        row, at = self.place[first]
        words: list[tuple[ir.Var, ...]] = []
        for start in (at - at % QUAD, at - at % QUAD + QUAD):
            numbers = tuple(row[start : start + QUAD]) or words[0]
            yield from self.made(numbers)
            words.append(numbers)
            if at % QUAD == 0:
                break
        whole = [self.of_bytes[w] for w in words]
        if at % QUAD == 0:
            self.of_place[first] = whole[0]
        else:
            self.of_place[first] = next(self.new)
            yield ir.Let(self.of_place[first], ir.Call(ir.SHIFTED[at % QUAD], (whole[0], whole[1])))


def _rows(lefts: list[list[ir.Var]]) -> Iterator[list[ir.Var]]:
    """Rows in which elements follow one another in most sums; each element is in one row."""
    counts = Counter((a, b) for each in lefts for a, b in pairwise(each) if a.type is b.type and a != b)
    after: dict[ir.Var, ir.Var] = {}
    before: dict[ir.Var, ir.Var] = {}
    for (a, b), _ in counts.most_common():
        if a not in after and b not in before and not _leads(b, a, after):
            after[a], before[b] = b, a
    for first in dict.fromkeys(x for each in lefts for x in each):
        if first not in before:
            row = [first]
            while row[-1] in after:
                row.append(after[row[-1]])
            yield row


def _leads(a: ir.Var, b: ir.Var, after: dict[ir.Var, ir.Var]) -> bool:
    """Whether one element comes some time behind another one."""
    while a != b and a in after:
        a = after[a]
    return a == b
