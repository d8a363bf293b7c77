"""The intermediate representation: immutable, interned, printable, independent of what is computed.

In: nodes. Out: text, well-formedness rules, and their meaning in NumPy, which finds races and
deadlocks. Knows: nothing above it.
"""

import warnings

from transconv.ir.dtype import (
    DTYPES,
    ELSEWHERE,
    EXACT_TERMS,
    DType,
    Rounding,
    RowTable,
    bf16,
    boolean,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i32,
    i64,
    index,
    index64,
    multiplied,
    multiplied_as,
    promote,
    tf32,
    type_named,
    u8,
)
from transconv.ir.expr import (
    FALSE,
    ONE,
    TRUE,
    ZERO,
    Add,
    And,
    Arithmetic,
    Binary,
    Compare,
    Const,
    Div,
    Eq,
    Expr,
    FloorDiv,
    Lane,
    Le,
    Like,
    Logic,
    Lt,
    Max,
    Min,
    Mod,
    Mul,
    Ne,
    Neg,
    Not,
    Or,
    Shl,
    Shr,
    Sub,
    Unary,
    Var,
    Xor,
    as_expr,
)
from transconv.ir.functions.calls import CALLS, REDUCERS, Callee, helpers, reducer_of
from transconv.ir.functions.packed_bytes import BYTES, PRODUCTS, SHIFTED
from transconv.ir.functions.rounding import (
    SHORT,
    chances,
    convert,
    held_constant,
    is_near,
    multiply_add,
    one_of_two,
    wrapped,
)
from transconv.ir.functions.saturation import at_random, divided, is_number, saturated
from transconv.ir.functions.size_values import MEANING, Values, function_of, value_at, values_of
from transconv.ir.interp.evaluate import Array, Evaluator, Fault, InterpError, Memory, contract, offsets_of
from transconv.ir.interp.kernel import run
from transconv.ir.layout import Layout, LayoutBlock
from transconv.ir.node import Node, ObjectMap, ObjectSet, field_names, node
from transconv.ir.operations import (
    Call,
    Cast,
    Reduce,
    Renamed,
    Select,
    Spread,
    addends,
    all_of,
    conjuncts,
    eq,
    maximum,
    minimum,
    ne,
    select,
    sum_of,
)
from transconv.ir.printer import readable
from transconv.ir.rules.names import LAUNCH, why_not_depth, why_not_name, why_not_text
from transconv.ir.rules.verifier import LEVELS, VerifyError, verify
from transconv.ir.sizes import LARGEST_SIZE, Size, Sizes, sizes_told, strictest, text_of
from transconv.ir.stmt import (
    ARRIVE,
    ASSUME,
    ATOMIC_ADD,
    DOT_ASYNC,
    DOT_WAIT,
    EXPECT,
    FENCE,
    FUNCS,
    PART_WAIT,
    SEND_WAIT,
    WAIT,
    Alloc,
    Barrier,
    BoxStore,
    Comment,
    Fetch,
    For,
    Func,
    FuncCall,
    If,
    Kernel,
    Let,
    Put,
    Role,
    Roles,
    Send,
    Seq,
    Shared,
    SlotTile,
    SmemRing,
    Stmt,
    Store,
    Update,
    dot,
    partial,
    seq,
    statements,
    store,
)
from transconv.ir.tensor import BoxLoad, Load, MemoryRead, Tensor, View, ViewDim
from transconv.ir.visit import (
    ExprMutator,
    Mutator,
    Visitor,
    bound_vars,
    find,
    free_vars,
    lanes_of,
    rewrite,
    substitute,
    updated,
    walk,
)

__all__ = ["ARRIVE", "ASSUME", "ATOMIC_ADD", "BYTES", "CALLS", "DOT_ASYNC", "DOT_WAIT", "DTYPES",
           "ELSEWHERE", "EXACT_TERMS", "EXPECT", "FALSE", "FENCE", "FUNCS", "LARGEST_SIZE", "LAUNCH",
           "LEVELS", "MEANING", "ONE", "PART_WAIT", "PRODUCTS", "REDUCERS", "SEND_WAIT", "SHIFTED",
           "SHORT", "TRUE", "WAIT", "ZERO", "Add", "Alloc", "And", "Arithmetic", "Array", "Barrier",
           "Binary", "BoxLoad", "BoxStore", "Call", "Callee", "Cast", "Comment", "Compare", "Const",
           "DType", "Div", "Eq", "Evaluator", "Expr", "ExprMutator", "Fault", "Fetch", "FloorDiv", "For",
           "Func", "FuncCall", "If", "InterpError", "Kernel", "Lane", "Layout", "LayoutBlock", "Le", "Let",
           "Like", "Load", "Logic", "Lt", "Max", "Memory", "MemoryRead", "Min", "Mod", "Mul", "Mutator",
           "Ne", "Neg", "Node", "Not", "ObjectMap", "ObjectSet", "Or", "Put", "Reduce", "Renamed", "Role",
           "Roles", "Rounding", "RowTable", "Select", "Send", "Seq", "Shared", "Shl", "Shr", "Size",
           "Sizes", "SlotTile", "SmemRing", "Spread", "Stmt", "Store", "Sub", "Tensor", "Unary", "Update",
           "Values", "Var", "VerifyError", "View", "ViewDim", "Visitor", "Xor", "addends", "all_of",
           "as_expr", "at_random", "bf16", "boolean", "bound_vars", "chances", "conjuncts", "contract",
           "convert", "divided", "dot", "eq", "f8e4m3", "f8e5m2", "f16", "f32", "f64", "field_names",
           "find", "free_vars", "function_of", "held_constant", "helpers", "i8", "i32", "i64", "index",
           "index64", "is_near", "is_number", "lanes_of", "maximum", "minimum", "multiplied",
           "multiplied_as", "multiply_add", "ne", "node", "offsets_of", "one_of_two", "partial", "promote",
           "readable", "reducer_of", "rewrite", "run", "saturated", "select", "seq", "sizes_told",
           "statements", "store", "strictest", "substitute", "sum_of", "text_of", "tf32", "type_named",
           "u8", "updated", "value_at", "values_of", "verify", "walk", "why_not_depth", "why_not_name",
           "why_not_text", "wrapped"]

_BEFORE = {"Buffer": "SmemRing", "Piece": "SlotTile", "Read": "MemoryRead"}  # names that 0.2 will not have


def __getattr__(name: str) -> type:
    if name not in _BEFORE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"transconv.ir.{name} is now {_BEFORE[name]}", DeprecationWarning, stacklevel=2)
    found: type = globals()[_BEFORE[name]]
    return found
