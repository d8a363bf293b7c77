"""Names: one rule for those of texts, of kernels and of their parameters.

Emitters print names unchanged, into Python that Triton reads. Python takes letters of other alphabets for
those they look like (``ｂ`` is ``b``), and names between two underscores each are its own."""

from __future__ import annotations

import ast
import keyword
import re

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
LONGEST = 160
"""Letters of a name, at most: with a digest, that of a file holds it. Gradients and copies of a text have
longer names than the text."""
LITERAL = ("inf", "nan")  # numbers in texts
# Triton passes these to a kernel, or calls them so in the function that it writes around a kernel's
# parameters.
LAUNCH = frozenset(
    "num_warps num_stages num_ctas maxnreg warp_size cluster_dims waves_per_eu matrix_instr_nonkdim "
    "kpack enable_fp_fusion launch_cooperative_grid launch_pdl extern_libs debug sanitize_overflow "
    "instrumentation_mode arch backend_name ptx_version ptx_options ir_override grid warmup device "
    "device_type stream options params specialization specialize_impl backend JITCallable".split()
)
"""Names that no parameter of a text of Triton may have."""
DEEPEST = 100
"""Operations inside one another in one expression of a text, at most: the passes behind the readers take
about four calls for each."""
MULTIPLIED = 8  # the largest power that may be written out as products
MOST_NODES = 20_000  # of an expression whose powers are written out


def why_not_name(name: str) -> str:
    """Why a text cannot be a name; empty if it can."""
    if not NAME.fullmatch(name):
        return "expected letters a to z, digits and _"
    if len(name) > LONGEST:
        return f"expected at most {LONGEST} letters, digits and _"
    if keyword.iskeyword(name) or name in LITERAL:
        return "it is a word of the language; expected another one"
    own = name.startswith("__") and name.endswith("__")
    return f"{name} is a name of Python itself; expected another one" if own else ""


def why_not_text(text: str) -> str:
    """Why a line cannot be read: a character that no text has; empty if there is none."""
    odd = next((c for c in text if not (" " <= c <= "~" or c == "\t")), "")
    return f"found {odd!r} ({ord(odd):#x}), expected letters a to z, digits and signs" if odd else ""


def why_not_depth(tree: ast.AST) -> str:
    """Why the tree of a Python expression is too deep, or too large; empty if it is not."""
    deepest, nodes = 0, 0
    todo = [(tree, 0, 1)]
    while todo and deepest <= DEEPEST and nodes <= MOST_NODES:
        at, depth, times = todo.pop()
        power = 1
        match at:
            case ast.BinOp(_, ast.Pow(), ast.Constant(value=int() as n)) if 1 < n <= MULTIPLIED:
                power = n
        depth, times = depth + power, times * power
        deepest, nodes = max(deepest, depth), nodes + times
        todo += [(part, depth, times) for part in ast.iter_child_nodes(at) if isinstance(part, ast.expr)]
    if deepest > DEEPEST:
        return f"more than {DEEPEST} operations inside one another; expected parts of it with names"
    return "" if nodes <= MOST_NODES else "too many operations; expected parts of it with names"
