"""Well-formedness of IR: named rules that hold between passes, each with a reason when it does not.

A rule is a generator function over one statement and what is in sight there. To add one, write the
function (in binding_rules.py or form_rules.py) and put it in ``RULES``; its name, with dashes, is how
errors call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from transconv.ir import binding_rules as binding
from transconv.ir import form_rules as form
from transconv.ir import stmt as st
from transconv.ir.sites import Site, sites, title


class VerifyError(RuntimeError):
    """Every rule that a tree breaks, where, and why. ``rules`` holds their names."""

    def __init__(self, breaches: list[tuple[str, st.Stmt, str]]) -> None:
        self.breaches = tuple(breaches)
        self.rules = frozenset(rule for rule, _, _ in breaches)
        lines = [f"  {rule}: `{title(s)}`: {reason}" for rule, s, reason in breaches]
        super().__init__("\n".join([f"{len(lines)} broken rules of the IR", *lines]))


Rule = Callable[[Site], Iterator[str]]
RULES: tuple[Rule, ...] = (
    binding.var_bound_before_use, binding.var_bound_once, binding.update_only_allocated,
    form.mask_is_boolean, form.offset_is_index, form.index_is_apart, binding.tensor_is_parameter,
    form.known_function, form.lanes_agree, form.lane_is_power_of_two, form.side_is_known,
    form.loop_is_simple, form.one_grid, form.origin_is_read, binding.workspace_is_of_a_tensor,
    binding.names_are_identifiers, binding.ring_is_reserved, form.piece_fits_its_box,
)


def verify(root: st.Stmt, loads_in_lets: bool = False) -> None:
    """Raise VerifyError with all rules that a tree breaks. ``loads_in_lets`` adds the rule that a
    Load is only the value of a Let, which the stages from lanes onwards keep."""
    rules = (*RULES, form.load_only_in_let) if loads_in_lets else RULES
    # What is no expression has no type and no text, so the other rules could not even be asked.
    breaches = list(_breaches(root, (form.expression_holds_no_statement,)))
    breaches = breaches or list(_breaches(root, rules))
    if breaches:
        raise VerifyError(breaches)


def _breaches(root: st.Stmt, rules: tuple[Rule, ...]) -> Iterator[tuple[str, st.Stmt, str]]:
    for site in sites(root):
        for rule in rules:
            for reason in rule(site):
                yield rule.__name__.replace("_", "-"), site.stmt, reason
