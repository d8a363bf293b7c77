"""Annotations: what a kernel declares of its arguments (sizes by symbols, constants, parameters that are
tuned), and groups: how the work of a launch is divided, by the simulator and the compiled kernels alike.

    H, W = symbols("H W")
    ROWS = Tunable("ROWS", 16, (8, 16, 32))

    @kernel(work_shape=(H, W), group_shape=(ROWS, 64))
    def add(group, X: Buffer[H, W], row: Buffer[1, W], Y: Buffer[H, W], n: Constant):
        ...

A symbol is bound by the first array that has it as a size; all others have to agree, which a call
checks before anything is launched. Numbers in an annotation are constants of the compiled kernel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from transconv.ir import Const, Expr, Values, Var, as_expr, free_vars, index, text_of, value_at
from transconv.kernel.tiles.values import PLACES, capacity
from transconv.support import KernelError


def symbols(names: str) -> Any:
    """Symbols of sizes, by names with spaces between; one name gives one symbol, several a tuple. Symbols
    can be added, multiplied and divided."""
    found = tuple(Var(n, index) for n in (names.split() if isinstance(names, str) else ()))
    if not found or not all(v.name.isidentifier() for v in found):
        raise KernelError(f"symbols({names!r}); expected names such as 'H W'")
    return found[0] if len(found) == 1 else found


class Constant:
    """The annotation of an integer for whose values kernels are compiled."""


@dataclass(frozen=True, slots=True)
class Tunable:
    """An integer that a kernel leaves to tuning: ``default`` until then. In the kernel it is a known
    number. ``values``: what tuning tries."""

    name: str
    default: int
    values: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole = [v for v in (self.default, *self.values) if isinstance(v, int) and not isinstance(v, bool)]
        if len(whole) != 1 + len(self.values) or not self.name.isidentifier():
            raise KernelError(
                f"Tunable({self.name!r}, {self.default!r}, {self.values!r}); expected a "
                "name, a whole number and a tuple of whole numbers"
            )
        object.__setattr__(self, "values", tuple(dict.fromkeys((self.default, *self.values))))


@dataclass(frozen=True, slots=True)
class Buffer:
    """The annotation of an array: ``Buffer[H, 64]`` has two dimensions, of which the second is 64 long."""

    sizes: tuple[Expr, ...]

    def __class_getitem__(cls, sizes: Any) -> Buffer:
        given = sizes if isinstance(sizes, tuple) else (sizes,)
        return cls(tuple(_size("Buffer", n) for n in given))


def _size(what: str, n: Any) -> Expr:
    if isinstance(n, Expr) or (isinstance(n, int) and not isinstance(n, bool) and n >= 0):
        return as_expr(n)
    raise KernelError(f"{what}[{n!r}]; expected symbols, whole numbers, or expressions of symbols")


@dataclass(frozen=True, slots=True)
class Meant:
    """What a kernel declares, for one call. ``places``: for each symbol the size that it is, as the user
    says it; ``constants``: sizes that are constants; ``tuned``: the values of tunable numbers."""

    places: dict[str, str] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    tuned: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on."""
        return tuple(sorted(self.places.items())), self.constants, tuple(sorted(self.tuned.items()))


NOTHING = Meant()
"""What a kernel without declarations declares."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a kernel: its group, its arguments by name, what the kernel declares for it, and the value
    of each symbol. ``declared``: whether the group is as the kernel declares it; ``made``: the results
    that the call leaves out, which are among the arguments."""

    group: Group
    given: dict[str, Any]
    meant: Meant
    symbols: dict[str, int]
    declared: bool = False
    made: tuple[Any, ...] = ()


Extent = Expr | Tunable | int


@dataclass(frozen=True, slots=True)
class Declared:
    """What a kernel declares: ``each``: annotations by parameter; ``work`` and ``shape``: of the group."""

    each: dict[str, Any] = field(default_factory=dict)
    work: tuple[Expr, ...] = ()
    shape: tuple[Extent, ...] = ()

    def bound(self, name: str, given: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
        """The value of each symbol for the arguments of a call, and the argument that has it. Raises
        KernelError for arrays that are not as declared."""
        found: dict[str, int] = {}
        where: dict[str, str] = {}
        later: list[tuple[str, Expr, int]] = []
        for said, e, size in self._sizes(name, given):
            if not isinstance(e, Var):
                later.append((said, e, size))
            elif found.setdefault(e.name, size) != size:
                raise KernelError(
                    f"{name}: {where[e.name]} is {found[e.name]} and {said} is {size}; "
                    f"both are {e.name}, so expected equal sizes"
                )
            where.setdefault(getattr(e, "name", ""), said)
        for said, e, size in later:
            if (wanted := value_of(name, e, found)) != size:
                raise KernelError(
                    f"{name}: {said} is {size}; expected {wanted}"
                    + ("" if isinstance(e, Const) else f", which is {text_of(e)}")
                )
        return {n: (size, where[n]) for n, size in found.items()}

    def _sizes(self, name: str, given: Mapping[str, Any]) -> Iterable[tuple[str, Expr, int]]:
        """Each size that is declared: as the user says it, as declared, as it is."""
        for parameter, declared in self.each.items():
            if parameter not in given:  # a result that the call leaves out
                continue
            value = given[parameter]
            if isinstance(declared, Buffer):
                shape = getattr(value, "shape", None)
                if shape is None or len(shape) != len(declared.sizes):
                    has = "no array" if shape is None else f"an array of {len(shape)} dimensions"
                    raise KernelError(
                        f"{name}: {parameter} is {has}; expected {len(declared.sizes)} "
                        f"dimensions, {parameter}: {_spelled(declared)}"
                    )
                for d, (e, n) in enumerate(zip(declared.sizes, shape, strict=True)):
                    yield f"{parameter}.shape[{d}]", e, int(n)
            elif isinstance(declared, Expr):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise KernelError(
                        f"{name}: {parameter} is {value!r}; expected a whole number, which "
                        f"is {text_of(declared)}"
                    )
                yield parameter, declared, value

    def constants(self) -> frozenset[str]:
        """What is a constant of the compiled kernel, as ``Number.said`` has it."""
        found = {p for p, declared in self.each.items() if declared is Constant}
        for parameter, declared in self.each.items():
            if isinstance(declared, Buffer):
                found |= {
                    f"{parameter}.shape[{d}]" for d, e in enumerate(declared.sizes) if isinstance(e, Const)
                }
        return frozenset(found)

    def group(self, name: str, bound: Mapping[str, tuple[int, str]], tuned: Mapping[str, int]) -> Group:
        """The group of a call whose symbols have these values. Raises KernelError for a symbol that no
        argument has."""
        sizes = {n: size for n, (size, _) in bound.items()}
        work = tuple(value_of(name, e, sizes) for e in self.work)
        shape = tuple(
            tuned.get(n.name, n.default) if isinstance(n, Tunable) else value_of(name, as_expr(n), sizes)
            for n in self.shape
        )
        return Group(work, shape or None)


def value_of(name: str, e: Expr, sizes: Values) -> int:
    """The value of a size of symbols. Raises KernelError for a symbol that no argument has."""
    missing = sorted(v.name for v in free_vars(e) if v.name not in sizes)
    if missing:
        raise KernelError(
            f"{name}: no argument has the size {missing[0]}; expected an annotation such as "
            f"X: Buffer[{missing[0]}]"
        )
    return value_at(e, sizes)


def _spelled(declared: Buffer) -> str:
    return f"Buffer[{', '.join(map(text_of, declared.sizes))}]"


def declared_of(function: Any, names: Sequence[str], work: Any = None, shape: Any = None) -> Declared:
    """What a function declares. ``names``: its parameters behind the group. Annotations of other kinds are
    for readers. Raises KernelError for one that cannot be evaluated, and for a work_shape that is none."""
    each = {}
    for parameter in names:
        said = getattr(function, "__annotations__", {}).get(parameter)
        if isinstance(said, str):
            said = _evaluated(function, said)
        if said is Constant or isinstance(said, (Buffer, Var)):
            each[parameter] = said
    return Declared(
        each,
        tuple(_size("work_shape", n) for n in _tuple(work)),
        tuple(n if isinstance(n, Tunable) else _size("group_shape", n) for n in _tuple(shape)),
    )


def _tuple(given: Any) -> tuple[Any, ...]:
    return () if given is None else tuple(given) if isinstance(given, (tuple, list)) else (given,)


def _evaluated(function: Any, text: str) -> Any:
    """The value of an annotation that is a string; None for one that means nothing here."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return eval(text, function.__globals__, {n: c.cell_contents for n, c in cells})
    except Exception:  # an annotation for type checkers alone
        return None


LONGEST = 1024  # elements of a group of one dimension that gets no hint
MOST_STAGES = 8
SQUARE = 32  # rows and columns of a group of more dimensions


def _sizes(name: str, given: int | Sequence[int], least: int) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, Sequence) else (given,)
    if not sizes or len(sizes) > len(PLACES) or any(not isinstance(n, int) or n < least for n in sizes):
        raise KernelError(f"{name}={given!r}; expected 1 to {len(PLACES)} whole numbers from {least} on")
    return sizes


@dataclass(frozen=True, slots=True)
class Group:
    """The work of a launch: ``work_shape`` elements, divided into groups.

    ``group_shape_hint``: the elements of a group, any sizes, of as many dimensions; default: 1,024, or 32
    by 32 along the last two dimensions, not beyond the work. ``subgroup_size_hint``: the items of a
    sub-group; chips have one size, which ``explain`` reports. ``warps_hint``: the warps of a group;
    ``stages_hint``: how many iterations' loads of a loop are in flight. Sizes may be given as one number.
    Raises KernelError for sizes below 1 (of the work: below 0)."""

    work_shape: tuple[int, ...] | int
    group_shape_hint: tuple[int, ...] | int | None = None
    subgroup_size_hint: int | None = None
    warps_hint: int | None = None
    stages_hint: int | None = None

    def __post_init__(self) -> None:
        work = _sizes("work_shape", self.work_shape, 0)
        object.__setattr__(self, "work_shape", work)
        if self.group_shape_hint is not None:
            hint = _sizes("group_shape_hint", self.group_shape_hint, 1)
            if len(hint) != len(work):
                raise KernelError(
                    f"group_shape_hint={hint} has {len(hint)} dimensions; work_shape="
                    f"{work} has {len(work)}"
                )
            object.__setattr__(self, "group_shape_hint", hint)
        size = self.subgroup_size_hint
        if size is not None and (not isinstance(size, int) or size < 1 or size & (size - 1)):
            raise KernelError(f"subgroup_size_hint={size!r}; expected a power of two")
        if self.warps_hint not in (None, 1, 2, 4, 8, 16, 32):
            raise KernelError(f"warps_hint={self.warps_hint!r}; expected 1, 2, 4, 8, 16 or 32")
        stages = self.stages_hint
        if stages is not None and (not isinstance(stages, int) or not 1 <= stages <= MOST_STAGES):
            raise KernelError(f"stages_hint={stages!r}; expected 1 to {MOST_STAGES}")

    @property
    def work(self) -> tuple[int, ...]:
        """The work's sizes."""
        assert isinstance(self.work_shape, tuple)
        return self.work_shape

    @property
    def shape(self) -> tuple[int, ...]:
        """The elements of one group."""
        if isinstance(self.group_shape_hint, tuple):
            return self.group_shape_hint
        if len(self.work) == 1:
            return (min(LONGEST, capacity(max(1, self.work[0]))),)
        sizes = [min(SQUARE, capacity(max(1, n))) for n in self.work[-2:]]
        return (*(1 for _ in self.work[:-2]), *sizes)

    @property
    def launched(self) -> tuple[Any, ...]:
        """What a compiled kernel depends on: the shape, and the hints."""
        return self.shape, self.subgroup_size_hint, self.warps_hint, self.stages_hint

    @property
    def groups(self) -> tuple[int, ...]:
        """The number of groups along each dimension; the last ones may reach beyond the work."""
        return tuple(-(-n // m) for n, m in zip(self.work, self.shape, strict=True))

    @property
    def count(self) -> int:
        """The number of groups."""
        return prod(self.groups)
