"""Choices and plans work for any workload: here for one of a front end that the package does not know."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from transconv import runtime
from transconv.compute import Alone, SampleOutcome, Workload, parse
from transconv.conv import ConvProblem, ConvWorkload, Prop
from transconv.errors import Unsupported
from transconv.runtime import Plan, check_records, first_run_check
from transconv.selection import choice, tuning_db
from transconv.support import knobs
from transconv.target import TARGETS

pytestmark = pytest.mark.usefixtures("nothing_known")
interpreted = pytest.mark.skipif(not knobs.interpret(), reason="needs TRITON_INTERPRET=1")
SM90, INTERPRETER = TARGETS["sm_90"], TARGETS["interpreter"]
TEXT = """
compute product
    axes   m={m} n=32 k=64
    read   a = A[m, k]
    read   b = B[n, k]
    let    s = sum(a * b; k)
    store  C[m, n] = s
"""


@dataclass(frozen=True)
class Product(Alone):
    """So many rows times one matrix: rows of the database speak of them, and results are checked."""

    @property
    def text(self) -> str:
        return f"rows {self.compute.size('m')}"

    def group(self, machine: str) -> str:
        return f"products_{machine}"

    def like(self, text: str) -> Product | None:
        return replace(self, compute=product(text)) if text.startswith("rows ") else None

    def distance(self, other: Workload) -> float | None:
        return 0.0 if self.text == other.text else 0.5

    def examine(self, tensors: dict[str, torch.Tensor], result: torch.Tensor) -> SampleOutcome:
        right = torch.allclose(result, tensors["A"] @ tensors["B"].T, atol=1e-3)
        return SampleOutcome(result.numel(), result.numel(), True, (), "" if right else "not the product")


def product(text: str) -> Any:
    return parse(TEXT.format(m=text.split()[1]).strip())


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(text: str, direction: str, behind: str) -> Workload | None:
        return Product(product(text)) if text.startswith("rows ") and not direction else None

    monkeypatch.setattr(tuning_db._sources, "readers", [*tuning_db._sources.readers])
    tuning_db.register_reader(read)


def test_rows_of_another_front_end(known: None) -> None:
    work = Product(product("rows 64"))
    ranked = choice.ranked(work.compute, SM90, work)
    assert {c.source for c in ranked} == {"estimate"}
    second = ranked[1].schedule
    tuning_db.remember([tuning_db.make(work, SM90, str(second), 1.0, 2)])
    first = choice.ranked(work.compute, SM90, work)[0]
    assert (first.source, first.schedule) == ("tuned", second)
    assert runtime.plan(work, SM90, None, False, Plan).schedule == second
    other = Product(product("rows 128"))
    assert all(c.away == 0.5 for c in choice.ranked(other.compute, SM90, other) if c.row)


def test_front_ends_do_not_read_each_other(known: None) -> None:
    p = ConvProblem.parse("mb1ic16ih4oc16oh4kh3ph1")
    conv, work = ConvWorkload(p, Prop.FWD), Product(product("rows 64"))
    assert conv.like(work.text) is None and work.like(conv.text) is None
    assert conv.distance(work) is None
    found = tuning_db.grouped([tuning_db.make(w, SM90, "x", 1.0, 1) for w in (conv, work)])
    machine = tuning_db.machine(SM90)
    assert sorted(found) == sorted(w.group(machine) for w in (conv, work))


def test_distances_of_convolutions_order_their_problems() -> None:
    """0 to itself alone, the same both ways, the longer, the more and the farther sizes differ."""

    def at(text: str, prop: Prop = Prop.FWD) -> ConvWorkload:
        return ConvWorkload(ConvProblem.parse(text), prop)

    def far(one: ConvWorkload, other: ConvWorkload) -> float:
        away = one.distance(other)
        assert away is not None and away == pytest.approx(other.distance(one))
        return away

    base = at("mb32ic64ih28oc64oh28kh3ph1")
    assert far(base, base) == 0 == far(base, at(str(base)))
    rising = [
        at(text)
        for text in (
            "mb32ic64ih30oc64oh28kh3",
            "mb33ic64ih28oc64oh28kh3ph1",
            "mb36ic64ih28oc64oh28kh3ph1",
            "mb64ic64ih28oc64oh28kh3ph1",
            "mb32ic128ih28oc64oh28kh3ph1",
            "mb64ic128ih28oc64oh28kh3ph1",
            "mb64ic128ih28oc32oh28kh3ph1",
        )
    ]
    found = [far(base, other) for other in rising]
    assert 0 < found[0] and found == sorted(set(found))
    assert far(base, replace(base, open=frozenset({"mb"}))) > 0
    assert 0 < far(base, at("mb32ic64ih28oc64oh28kh3ph1 dt=bf16")) < far(rising[3], rising[4])
    for other in (
        "mb32ic64ih28oc64oh28kh1",
        "mb32ic64ih28oc64oh14kh3sh2ph1",
        "mb32ic8ih28oc64oh28kh3ph1",
        "mb32ic64ih28oc64oh28kh3dh1ph2",
        "g2mb32ic64ih28oc64oh28kh3ph1",
    ):
        assert base.distance(at(other)) is None, other


@interpreted
def test_a_first_result_is_checked_as_the_workload_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSCONV_TRUST", "always")
    work = Product(product("rows 64"))
    plan = runtime.plan(work, INTERPRETER, None, False, Plan)
    tensors = {"A": torch.randn(64, 64), "B": torch.randn(32, 64), "C": torch.empty(64, 32)}
    assert first_run_check.run(plan, tensors) is plan and first_run_check.is_trusted(plan)
    check_records.forget()
    monkeypatch.setattr(Product, "examine", lambda *_: SampleOutcome(9, 9, True, ((0, 0),), "wrong"))
    monkeypatch.setattr(first_run_check, "MOST_REJECTED", 2)
    with pytest.raises(Unsupported, match="gave wrong results|known to give wrong"):
        first_run_check.run(plan, tensors)


def test_a_computation_by_itself_has_rows_of_its_own_and_a_sampled_check() -> None:
    alone = Alone(product("rows 64"))
    group = alone.group("sm_90x132")
    assert group.startswith("sm_90x132_compute_") and group != Alone(product("rows 32")).group("sm_90x132")
    assert alone.innermost() is None and alone.like("x") is None and alone.like(alone.text) == alone
    assert alone.part_of((0, 0)) == () and alone.named("product") is alone.compute
    assert alone.distance(Alone(product("rows 32"))) is None and alone.about(alone.compute) is alone
    tensors = {t.name: torch.ones(t.shape) for t in alone.tensors}
    assert "are wrong, the first at" in alone.examine(tensors, tensors[alone.result]).reason
