"""BoundedCache: what is asked for stays, what nobody asks for goes, and threads agree on one value."""

import sys
import threading

import pytest

from synk._base.bounded_cache import BoundedCache


def fail():
    raise AssertionError("the value is there")


def fill(cache, keys):
    for key in keys:
        cache.get(key, lambda key=key: [key])


def kept(cache, keys):
    """The keys whose values are there."""
    return [key for key in keys if key in cache._kept]


def test_a_value_is_made_once():
    """Equal keys have one value; a failure is told and not kept."""
    cache = BoundedCache()
    value = cache.get((1, "a"), object)
    assert cache.get((1.0, "a"), fail) is value
    with pytest.raises(AssertionError, match="is there"):
        cache.get("b", fail)
    assert cache.get("b", lambda: 3) == 3


@pytest.mark.parametrize("most", [1, 2, 5, 8])
def test_it_holds_so_many(most):
    """Never more, and the newest is among them."""
    cache = BoundedCache(most)
    for key in range(3 * most):
        fill(cache, [key])
        assert len(cache._kept) == min(key + 1, most) and kept(cache, [key])


def test_what_is_used_stays():
    """Whatever comes and goes beside it; of others the oldest goes."""
    cache = BoundedCache(8)
    fill(cache, "abcdef")
    for key in range(20):
        fill(cache, [key])
        cache.get("b", fail), cache.get("d", fail)
    assert kept(cache, "abcdef") == ["b", "d"] and kept(cache, range(20)) == [*range(14, 20)]


def test_threads_get_one_value():
    """Also of keys whose comparison lets other threads run, while values come and go."""

    class Key(int):
        def __eq__(self, other):
            threading.Event().wait(1e-6)
            return int(self) == int(other)

        def __hash__(self):
            return int(self) % 2

    cache, seen, errors = BoundedCache(6), [[] for _ in range(4)], []

    def work(mine):
        try:
            for turn in range(60):
                mine.append(cache.get(Key(0), object))
                cache.get(Key(turn % 11 + 1), object)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(mine,)) for mine in seen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors and len({id(value) for mine in seen for value in mine}) == 1 and len(cache._kept) == 6
