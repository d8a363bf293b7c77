"""Which rows a rank needs, against all pairs of positions that the convolution connects."""

from __future__ import annotations

import random

import pytest

from transconv.compute import AxisSpan
from transconv.conv import Prop
from transconv.distributed.halo import SpatialAxis, exchange, planned, shards
from transconv.distributed.placements import splits
from transconv.distributed.sharded_convolution import apart


def drawn(seed: int) -> tuple[SpatialAxis, int]:
    r = random.Random(seed)
    while True:
        k, stride, dilation = r.randint(1, 7), r.randint(1, 5), r.randint(1, 4)
        i, pad, high = r.randint(1, 30), r.randint(0, k * dilation), r.randint(0, k * dilation)
        o = (i + pad + high - dilation * (k - 1) - 1) // stride + 1
        if o >= 1:
            return SpatialAxis(i, o, k, stride, dilation, pad), r.choice((1, 2, 3, 5, 40))


def pairs(line: SpatialAxis) -> list[tuple[int, int]]:
    """The positions of src and dst that a tap connects."""
    return [
        (i, o)
        for o in range(line.o)
        for k in range(line.k)
        if 0 <= (i := o * line.stride + k * line.dilation - line.pad) < line.i
    ]


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("prop", [Prop.FWD, Prop.BWD_D])
def test_a_rank_has_what_it_reads_and_little_more(seed: int, prop: Prop) -> None:
    line, parts = drawn(seed)
    size = line.o if prop is Prop.FWD else line.i
    for mine in shards(size, parts):
        found = line.needs(prop, mine)
        reads = [
            i if prop is Prop.FWD else o
            for i, o in pairs(line)
            if mine.start <= (o if prop is Prop.FWD else i) < mine.stop
        ]
        if reads:  # at the edges of the tensor a dilated kernel may skip rows
            assert 0 <= min(reads) - found.start <= max(line.stride, line.dilation)
            assert 0 <= found.stop - 1 - max(reads) <= max(line.stride, line.dilation)
        if found.size:
            assert line.window(*((found, mine) if prop is Prop.FWD else (mine, found))).low >= 0


@pytest.mark.parametrize("seed", range(20))
def test_what_one_sends_another_awaits(seed: int) -> None:
    line, parts = drawn(seed)
    owned = shards(line.i, parts)
    needed = [line.needs(Prop.FWD, rows) for rows in shards(line.o, parts)]
    plans = [exchange(owned, needed, rank) for rank in range(parts)]
    sent = {
        (me, peer, rows.start + owned[me].start, rows.size)
        for me, plan in enumerate(plans)
        for peer, rows in plan.sends
    }
    awaited = {
        (peer, me, rows.start, rows.size)
        for me, plan in enumerate(plans)
        for peer, rows in plan.pieces
        if peer >= 0
    }
    assert sent == awaited
    for plan in plans:
        assert sum(rows.size for _, rows in plan.pieces) == plan.needed.size
        assert [rows.start for _, rows in plan.pieces] == sorted(rows.start for _, rows in plan.pieces)


def test_shards_are_those_of_dtensor() -> None:
    assert shards(10, 4) == (AxisSpan(0, 3), AxisSpan(3, 6), AxisSpan(6, 9), AxisSpan(9, 10))
    assert shards(3, 5) == (AxisSpan(0, 1), AxisSpan(1, 2), AxisSpan(2, 3), AxisSpan(3, 3), AxisSpan(3, 3))


def test_axes_that_split_follow_from_the_views() -> None:
    plain = {s.name: (s.input, s.weight, s.bias, s.result) for s in splits(2, False, False)}
    assert plain == {
        "mb": (0, None, None, 0),
        "oc": (None, 0, 0, 1),
        "ic": (1, 1, None, None),
        "oh": (2, None, None, 2),
        "ow": (3, None, None, 3),
    }
    grouped = {s.name: (s.input, s.weight, s.bias, s.result) for s in splits(1, False, True)}
    assert grouped == {"g": (1, 0, 0, 1), "mb": (0, None, None, 0), "ow": (2, None, None, 2)}
    transposed = {s.name: (s.input, s.weight, s.bias, s.result) for s in splits(1, True, False)}
    assert transposed == {
        "mb": (0, None, None, 0),
        "ow": (2, None, None, 2),
        "ic": (None, 1, 0, 1),
        "oc": (1, 0, None, None),
    }


@pytest.mark.every(2)
@pytest.mark.parametrize("prop", [Prop.FWD, Prop.BWD_D])
def test_rows_that_are_computed_while_others_travel(prop: Prop) -> None:
    """Rows away from the edges read none of others; with the rank's own rows, those that it receives are
    each pair of rows once."""
    served = 0
    for seed in range(200):
        line, _ = drawn(seed)
        line = SpatialAxis(
            8 * line.i, line.o + 7 * line.i // line.stride, *(line.k, line.stride, line.dilation, line.pad)
        )
        every = pairs(line)
        every = every if prop is Prop.FWD else [pair[::-1] for pair in every]  # (read, made)
        for rank in range(3):
            plan = planned(line, prop, 3, rank)
            found = apart(line, prop, 3, rank)
            if found is None:
                continue
            served += 1
            own, mine = found.own
            here = [pair for pair in every if mine.start <= pair[1] < mine.stop]
            again = [made for edge in found.edges for made in range(*edge.other)]
            assert len(again) <= mine.size // 8
            for read, made in here:
                assert own.start <= read < own.stop or made in again
            for edge in found.edges:
                assert all(
                    edge.read.start <= read < edge.read.stop
                    for read, made in here
                    if edge.other.start <= made < edge.other.stop
                )
            summed = [
                pair
                for rows in (found.own, *found.received)
                for pair in here
                if rows.read.start <= pair[0] < rows.read.stop
                and rows.other.start <= pair[1] < rows.other.stop
            ]
            assert sorted(summed) == sorted(here)
            assert plan.received
    assert served > 100


def test_rows_that_lie_in_the_padding_alone() -> None:
    """The rows before those that read rows of others may read none at all: nothing is computed apart."""
    line = SpatialAxis(55, 59, 1, 2, 4, 31)
    assert line.needs(Prop.FWD, AxisSpan(15, 16)).size == 0
    assert line.needs(Prop.FWD, AxisSpan(16, 17)) == AxisSpan(1, 2)
    own = shards(55, 4)[1]
    assert own == AxisSpan(14, 28) and apart(line, Prop.FWD, 4, 1) is None
