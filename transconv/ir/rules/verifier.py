"""Well-formedness of IR: named rules that hold between passes, each with a reason when it does not.

A rule is a generator function: it takes a ``Site`` and yields a sentence for each breach. Errors call it
by its name, with dashes. ``RULES`` hold for every tree, ``LEVELS`` also for kernels of a level
(rules/levels.py). To add a rule, write the function and add it to one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from transconv.ir import stmt as st
from transconv.ir.rules import bindings as binding
from transconv.ir.rules import forms as form
from transconv.ir.rules import levels as level_of
from transconv.ir.rules.sites import Site, alone, sites, statements, title


class VerifyError(RuntimeError):
    """A tree breaks rules. The message names each rule, the statement and the reason, the level and the
    stage. ``rules`` holds the names of the rules' functions, with dashes."""

    def __init__(self, breaches: list[tuple[str, st.Stmt, str]], level: str = "", stage: str = "") -> None:
        self.breaches = tuple(breaches)
        self.rules = frozenset(rule for rule, _, _ in breaches)
        lines = [f"  {rule}: `{title(s)}`: {reason}" for rule, s, reason in breaches]
        where = f" at the level {level}" * bool(level) + f" after {stage}" * bool(stage)
        super().__init__("\n".join([f"{len(lines)} broken rules of the IR{where}", *lines]))


Rule = Callable[[Site], Iterator[str]]
RULES: tuple[Rule, ...] = (
    binding.var_bound_before_use, binding.var_bound_once, binding.update_only_allocated,
    form.mask_is_boolean, form.truth_is_apart, form.offset_is_index, form.index_is_apart,
    form.constant_is_of_its_type, binding.tensor_is_parameter, form.known_function, form.lanes_agree,
    form.renamed_is_one_to_one, form.lane_is_power_of_two, form.side_is_known, form.loop_is_simple,
    form.one_grid, form.origin_is_read, binding.workspace_is_of_a_tensor, binding.names_are_identifiers,
    binding.ring_is_reserved, form.piece_fits_its_box,
)
TILED: tuple[Rule, ...] = (form.load_only_in_let, level_of.kernel_is_a_grid, level_of.axes_are_tiled)
LANES: tuple[Rule, ...] = (
    *TILED, level_of.tiles_are_lanes, level_of.a_name_is_one_lane, level_of.shapes_are_ordered,
    level_of.products_are_of_names)
LEVELS: dict[str, tuple[Rule, ...]] = {
    "compute": (),  # there is no kernel yet; compute.why_not_lowered checks the computation
    "nest": (form.load_only_in_let, level_of.values_are_scalars, level_of.loops_are_axes,
             level_of.parallel_loops_are_outside, level_of.sums_begin_before_loops,
             level_of.sums_only_grow, level_of.nothing_is_called, level_of.elements_are_read_one_by_one,
             level_of.nothing_is_explicit),
    "tiles": (*TILED, level_of.values_are_scalars, level_of.tiles_become_lanes, level_of.sums_only_grow,
              level_of.nothing_is_explicit, level_of.tiles_are_dealt_in_the_grid),
    "lanes": (*LANES, level_of.nothing_is_explicit, level_of.tiles_are_dealt_in_the_grid),
    "explicit": (*LANES, level_of.roles_share_a_program, level_of.only_roles_wait, level_of.roles_say_all,
                 level_of.pieces_are_multiplied),
}
"""The rules of each level, by its name."""


OF_STATEMENTS: frozenset[Rule] = frozenset({
    form.mask_is_boolean, form.truth_is_apart, form.offset_is_index, form.index_is_apart,
    form.constant_is_of_its_type, form.lane_is_power_of_two, form.side_is_known, form.origin_is_read,
    form.piece_fits_its_box, form.known_function, binding.workspace_is_of_a_tensor,
    binding.names_are_identifiers, form.load_only_in_let, level_of.values_are_scalars,
    level_of.sums_only_grow, level_of.nothing_is_called, level_of.elements_are_read_one_by_one,
    level_of.nothing_is_explicit, level_of.kernel_is_a_grid, level_of.axes_are_tiled,
    level_of.tiles_become_lanes, level_of.tiles_are_lanes, level_of.a_name_is_one_lane,
    level_of.shapes_are_ordered, level_of.products_are_of_names, level_of.pieces_are_multiplied})
"""The rules that depend on the statement alone: a statement that has passed them is not checked again."""


def verify(root: st.Stmt, level: str = "", stage: str = "") -> None:
    """Raise VerifyError with all rules that a tree breaks: ``RULES`` and, if a ``level`` is given, the
    level's. ``stage``: the pass that made the tree, for the message. KeyError for an unknown level."""
    rules = (*RULES, *LEVELS[level]) if level else RULES
    if (whole := f"all in {level}") in _kept(root):
        return
    everything = dict.fromkeys(statements(root))
    new = [s for s in everything if level not in _kept(s)]
    # First, because the other rules need the types and texts of all expressions.
    breaches = list(_breaches(map(alone, new), [form.expression_holds_no_statement]))
    if not breaches:
        apart = [rule for rule in rules if rule in OF_STATEMENTS]
        for s in new:
            found = list(_breaches([alone(s)], apart))
            if not found:
                _kept(s).add(level)
            breaches += found
        breaches += _breaches(sites(root), [rule for rule in rules if rule not in OF_STATEMENTS])
    if breaches:
        order = {s: at for at, s in enumerate(everything)}
        raise VerifyError(sorted(breaches, key=lambda found: order[found[1]]), level, stage)
    _kept(root).add(whole)


def _kept(s: st.Stmt) -> set[str]:
    """The levels whose rules in ``OF_STATEMENTS``, or all of its tree, a statement has passed; cached."""
    try:
        return s._kept
    except AttributeError:
        object.__setattr__(s, "_kept", set())
        return s._kept


def _breaches(of: Iterable[Site], rules: list[Rule]) -> Iterator[tuple[str, st.Stmt, str]]:
    for site in of:
        for rule in rules:
            for reason in rule(site):
                yield rule.__name__.replace("_", "-"), site.stmt, reason
