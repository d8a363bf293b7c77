"""The cache in memory: bounded, emptied with all others, and the first value of a key is the one kept."""

from __future__ import annotations

import pytest

from transconv.support import Cache, forget_all


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache[str, int]:
    monkeypatch.setattr(Cache, "every", [])
    return Cache("numbers", 3)


def test_the_first_value_stays(cache: Cache[str, int]) -> None:
    assert (cache.keep("a", 1), cache.keep("a", 2), cache["a"], cache.get("b")) == (1, 1, 1, None)


def test_where_there_is_no_room_all_others_go(cache: Cache[str, int]) -> None:
    for n, key in enumerate("abc"):
        cache.keep(key, n)
    assert cache.keep("c", 7) == 2 and len(cache) == 3, "a key that is there needs no room"
    assert cache.keep("d", 3) == 3 and dict(cache) == {"d": 3}


def test_all_are_emptied_at_once(cache: Cache[str, int]) -> None:
    other: Cache[str, int] = Cache("others")
    cache.keep("a", 1)
    other.keep("b", 2)
    forget_all()
    assert not cache and not other
