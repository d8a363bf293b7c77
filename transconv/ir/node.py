"""Immutable, interned nodes: two nodes are equal exactly when they are the same object.

Every IR class is a small frozen, slotted dataclass made by ``@node``. Building a node that already
exists returns the existing one, so structural equality is ``a is b`` (``a.is_equal(b)`` says the
same in words) and passes see "nothing changed" as identity. Children are found by reflection over
the fields, so walking, substitution and printing are written once (see ``visit.py``)."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass, fields
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform
from weakref import WeakKeyDictionary, WeakValueDictionary

_interned: WeakValueDictionary[Any, Node] = WeakValueDictionary()
# The weak reference to the node of a key; WeakValueDictionary.get is a function of Python's, thus slower.
_reference = attrgetter("data")(_interned).get
_hashes: WeakKeyDictionary[Node, int] = WeakKeyDictionary()
_lock = threading.Lock()


@cache
def field_names(cls: type) -> tuple[str, ...]:
    """The names of a node class's fields, in order; cached, because every walk needs them."""
    return tuple(f.name for f in fields(cls))


def field_values(of: Node) -> Any:
    """The values of a node's fields, in order."""
    return _values(type(of))(of)


@cache
def _values(cls: type) -> Any:
    names = field_names(cls)
    return attrgetter(*names) if len(names) > 1 else lambda of: tuple(getattr(of, n) for n in names)


@cache
def _known(cls: type) -> tuple[tuple[object, ...], set[type], set[type]]:
    """Of a class the defaults of its fields, in order, with ``MISSING`` for those without; the types of
    values that it keeps as they are given, such as no NumPy scalar, filled as values come; and those of
    them that are keys as they are."""
    return tuple(f.default for f in fields(cls)), set(), set()


def _key(value: object) -> object:
    """A hashable key of a field's value: 1, True and 1.0 are equal in Python but not in the IR."""
    if isinstance(value, tuple):
        return tuple(_key(v) for v in value)
    if isinstance(value, (bool, float)):
        return (type(value).__name__, float(value).hex())
    return value


class _Interning(type):
    """Metaclass whose call returns the existing node with the same fields, if there is one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        defaults, kept, keys = _known(cls)
        given = () if kwargs else args if len(args) == len(defaults) else args + defaults[len(args) :]
        key = None
        if given and keys.issuperset(map(type, given)):
            key = (cls, *given)
        elif given and kept.issuperset(map(type, given)):
            key = (cls, *map(_key, given))
        if key is not None:  # it may be there: then none is made
            there = _reference(key)
            if there is not None and (found := there()) is not None:
                return found
        made = super().__call__(*args, **kwargs)
        if key is None:
            values = field_values(made)
            same = {type(v) for v, a in zip(values, given, strict=False) if v is a}
            kept |= same
            keys |= {of for of in same if not issubclass(of, (tuple, bool, float))}
            key = (cls, *map(_key, values))
        with _lock:
            there = _reference(key)
            if there is not None and (found := there()) is not None:
                return found
            _interned[key] = made
            return made


class Node(metaclass=_Interning):
    """Base of expressions, statements, functions, tensors and layouts."""

    # Cached results of analyses (_free_vars, _own_lanes: visit.py, _dtype: expr.py, _within:
    # rules/forms.py, _kept: rules/verifier.py).
    __slots__ = ("__weakref__", "_children", "_dtype", "_free_vars", "_kept", "_own_lanes", "_within")
    _children: tuple[Node, ...]
    _dtype: Any
    _free_vars: frozenset[Any]
    _kept: set[str]
    _own_lanes: frozenset[Any] | None
    _within: dict[type, list[Any]]

    def is_equal(self, other: object) -> bool:
        """Structural equality; identity, because nodes are interned."""
        return self is other

    def get_hash(self) -> int:
        """A 64-bit hash of the structure, the same in every process, so that file names can use it."""
        found = _hashes.get(self)
        if found is None:
            digest = hashlib.blake2b(digest_size=8)
            digest.update(type(self).__name__.encode())
            for value in field_values(self):
                _feed(digest, value)
            found = _hashes[self] = int.from_bytes(digest.digest(), "big")
        return found

    def children(self) -> tuple[Node, ...]:
        """Every node that a field holds, in field order."""
        try:
            return self._children
        except AttributeError:
            found: list[Node] = []
            for value in field_values(self):
                if isinstance(value, Node):
                    found.append(value)
                elif isinstance(value, tuple):
                    found += [v for v in value if isinstance(v, Node)]
            object.__setattr__(self, "_children", tuple(found))
            return self._children

    def dump(self) -> None:
        """Print the node, for use in a debugger."""
        print(self)

    def __copy__(self) -> Node:
        return self

    def __deepcopy__(self, memo: object) -> Node:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), field_values(self)


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, Node):
        digest.update(value.get_hash().to_bytes(8, "big"))
    elif isinstance(value, tuple):
        digest.update(b"(%d" % len(value))
        for v in value:
            _feed(digest, v)
    else:
        digest.update(f"{type(value).__name__}:{value!r};".encode())


N = TypeVar("N", bound=type)


@dataclass_transform(frozen_default=True, eq_default=False)
def node(cls: N) -> N:
    """Make a class an interned IR node: frozen, slotted, compared by identity.

    ``repr`` of a node is Python that rebuilds it where the names of ``transconv.ir`` are visible."""
    return dataclass(frozen=True, slots=True, eq=False)(cls)  # type: ignore[return-value]


class ObjectMap(dict[Node, Any]):
    """A dict keyed by structure; a plain dict, because equal nodes are one object."""


class ObjectSet(set[Node]):
    """A set of structures; a plain set, because equal nodes are one object."""
