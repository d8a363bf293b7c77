"""Statements of a kernel's source, read into a kernel of the IR, at the level of lanes."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from transconv.kernel.frontend.arithmetic import BINARY
from transconv.kernel.frontend.assignments import Assignments
from transconv.kernel.frontend.calls import is_static
from transconv.kernel.frontend.group_scope import GroupScope
from transconv.kernel.frontend.inlining import Returned
from transconv.kernel.frontend.scopes import for_items
from transconv.kernel.refusals import Refusal, WrongScope, spelled
from transconv.kernel.tiles.values import AtomicView

INSTEAD = {
    "While": ("a while loop", "a for loop over range(...)", "for k in range(0, n, 16):"),
    "Try": ("try", "kernels raise nothing", ""),
    "With": ("with", "loops and branches", ""),
    "Import": ("an import", "imports above the kernel", ""),
    "ImportFrom": ("an import", "imports above the kernel", ""),
    "Global": ("global", "arguments of the kernel", ""),
    "Nonlocal": ("nonlocal", "arguments of the kernel", ""),
    "Delete": ("del", "names may just be left", ""),
    "Raise": ("raise", "kernels raise nothing", ""),
    "ClassDef": ("a class", "tiles, numbers and tuples", ""),
    "AsyncFunctionDef": ("an async function", "plain statements", ""),
    "Break": ("break", "a loop that runs to its end, and np.where", "np.where(done, x, y)"),
    "Continue": ("continue", "an if around the rest of the loop", "if k != i:"),
    "Match": ("match", "if", "if n == 1:"),
}


class StatementTracer(Assignments):
    """Reads statements. ``env`` has the values of names; statements of the kernel collect in ``b``."""

    def run(self, body: Sequence[ast.stmt]) -> None:
        for s in body:
            before, self.at = self.at, s
            try:
                method = getattr(self, f"do_{type(s).__name__}", None)
                if method is None:
                    raise Refusal(*INSTEAD.get(type(s).__name__, (spelled(s), "assignments, loops, if")))
                method(s)
            except Refusal as refusal:
                raise self.error(refusal) from None
            finally:
                self.at = before

    def do_Pass(self, s: ast.Pass) -> None:
        pass

    def do_FunctionDef(self, s: ast.FunctionDef) -> None:
        """``@group.workitems def inner(item): ...``"""
        kinds = [d.attr for d in s.decorator_list if isinstance(d, ast.Attribute)
                 and isinstance(self.value(d.value), GroupScope)]
        if len(kinds) != 1 or kinds[0] not in ("workitems", "subgroups") or len(s.decorator_list) != 1:
            raise Refusal("a function inside of a kernel", "@group.workitems and @group.subgroups there, "
                          "@kernel.func outside")
        if self.items:
            raise WrongScope(f"@group.{kinds[0]} inside of {self.here.scope.value}",
                             "the scope of the group")
        if len(s.args.args) != 1 or s.args.defaults or s.args.vararg or s.args.kwonlyargs or s.args.kwarg:
            raise Refusal(f"a function of {kinds[0]} with other parameters", "one, the item",
                          "def inner(item):")
        first = s.decorator_list[0]
        assert isinstance(first, ast.Attribute)
        self.env[s.name] = for_items(s, kinds[0], self.value(first.value))

    def do_Return(self, s: ast.Return) -> None:
        if self.returns:
            if self.depth != self.base:
                raise Refusal("a return inside of a loop or branch at run time", "one behind it",
                              "return np.where(x > 0, x, y)")
            raise Returned(None if s.value is None else self.value(s.value))
        if s.value is not None:
            raise Refusal("a result", "results are stored to arrays", "group.store(Y[i:], y)")
        if self.depth or self.items or s is not self.source.tree.body[-1]:
            raise Refusal("a return before the end", "an if around the rest")

    def do_Assert(self, s: ast.Assert) -> None:
        held = self.value(s.test)
        if not is_static(held):
            raise Refusal("an assert of what is known at run time only", "sizes, types, numbers")
        if not held:
            said = f": {self.value(s.msg)}" if s.msg is not None else ""
            raise Refusal(f"an assertion that does not hold, {spelled(s.test)}{said}")

    def do_Expr(self, s: ast.Expr) -> None:
        if not isinstance(s.value, ast.Constant):
            self.value(s.value)

    # -- assignments --

    def do_AnnAssign(self, s: ast.AnnAssign) -> None:
        if s.value is not None:
            self.assign([s.target], s.value)

    def do_Assign(self, s: ast.Assign) -> None:
        self.assign(s.targets, s.value)

    def do_AugAssign(self, s: ast.AugAssign) -> None:
        target = s.target
        if isinstance(target, ast.Subscript) and isinstance(of := self.value(target.value), AtomicView):
            self.added_to(of.view, self.value(target.slice), s)
            return
        if isinstance(target, ast.Name):
            left = self.value(ast.copy_location(ast.Name(target.id, ast.Load()), target))
            since = len(self.b.stmts)
            right = self.raw(s.value)
            left = self.still(left, since)
            if isinstance(s.op, ast.Add) and self.accumulated(target.id, left, right):
                return
            right = self.whole(right)
        else:
            load = ast.copy_location(ast.parse(ast.unparse(target), mode="eval").body, target)
            left, right = self.value(_placed(load, target)), self.value(s.value)
        self.bind(target, self.binary(BINARY[type(s.op)], left, right))


def _placed(load: ast.expr, at: ast.AST) -> ast.expr:
    for n in ast.walk(load):
        ast.copy_location(n, at)
    return load
