"""What became of kernels that were compiled without a GPU: a table, and the forms that were asked for."""

from __future__ import annotations

from collections.abc import Sequence

from transconv.backend_triton import Answer, CompileFailure, Resources

TEXTS = ("ttir", "ttgir", "llir", "ptx", "amdgcn", "sass")


def printed(name: str, answers: Sequence[Answer], text: str) -> int:
    """Print what became of kernels, and the form of each that was asked for. Returns the exit code."""
    print(f"{name}\n\n{table(answers)}")
    for a in answers:
        if isinstance(a, CompileFailure) and a.log:
            print(f"\n{a.function} for {a.target}:\n{a.log}")
        elif isinstance(a, Resources):
            for form in a.texts.values():
                print(f"\n{a.function} for {a.target}:\n{form}")
            if text and not a.texts:
                print(f"\n{a.function} for {a.target}: its compiler makes no {text}")
    return 1 if any(isinstance(a, CompileFailure) for a in answers) else 0


def table(answers: Sequence[Answer]) -> str:
    """A row for each kernel."""
    lines = [f"{'target':<8} {'registers':>9} {'spilt':>6} {'shared':>7} {'time':>6}  "
             "kernel, instructions", "-" * 100]
    for a in answers:
        if isinstance(a, CompileFailure):
            lines += [f"{a.target:<8} {'not compiled':<32}  {a.function}", f"{'':<42}{a.reason}"]
            continue
        words = " ".join(f"{w}:{n}" for w, n in a.words.items())
        lines.append(f"{a.target:<8} {a.registers:>9} {a.spill_bytes:>6} {a.shared_bytes:>7} "
                     f"{a.seconds:>5.1f}s  {a.function}")
        lines.append(f"{'':<42}{words}")
        lines += [f"{'':<42}{w}" for w in a.warnings]
        if a.flaw:
            lines.append(f"{'':<42}miscompiled, so it would be rejected: {a.flaw}")
        if a.serialised:
            lines.append(f"{'':<42}the matrix unit waits after each product (serialised)")
    return "\n".join(lines)
