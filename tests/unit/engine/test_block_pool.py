"""Pages: references, prefix sharing, eviction."""

from __future__ import annotations

import pytest

from outrider.engine.kv_cache.block_pool import ROOT_HASH, BlockPool, extend_hashes, page_hash


def chain(*pages: tuple[int, ...]) -> list[bytes]:
    hashes = [ROOT_HASH]
    for tokens in pages:
        hashes.append(page_hash(hashes[-1], tokens))
    return hashes[1:]


def test_page_hash_with_other_tokens_before_differs() -> None:
    assert chain((1, 2), (3, 4))[1] != chain((1, 9), (3, 4))[1]
    assert chain((1, 2), (3, 4)) == chain((1, 2), (3, 4))


@pytest.mark.parametrize("lead", [0, 1])
def test_hashes_that_grow_page_by_page_are_those_of_the_whole_text(lead: int) -> None:
    text = [5, 3, 8, 1, 9, 2, 7]
    whole, grown, other = list[bytes](), list[bytes](), list[bytes]()
    extend_hashes(whole, text, 3, 2, lead)
    for num_pages in (0, 1, 2, 2, 3):
        extend_hashes(grown, text, num_pages, 2, lead)
    extend_hashes(other, [6, *text[1:]], 3, 2, lead)
    assert grown == whole
    assert set(other).isdisjoint(whole)


def test_block_pool_keeps_shared_pages_until_the_last_release() -> None:
    pool = BlockPool(4)
    table = [pool.allocate(), pool.allocate()]
    for page, key in zip(table, chain((1,), (2,)), strict=True):
        pool.publish(page, key)
    found = pool.match(chain((1,), (2,), (3,)))
    assert found == table
    pool.share(found)
    pool.check_invariants([table, found])
    pool.release(table)
    assert pool.num_free == 2
    pool.check_invariants([found])
    pool.release(found)
    assert pool.num_free == 4
    assert pool.match(chain((1,))) == table[:1], "free pages are still known"
    pool.check_invariants([])


def test_block_pool_gives_discarded_pages_to_others() -> None:
    pool = BlockPool(3)
    table, own = [pool.allocate()], pool.take(2)
    pool.discard(own)
    pool.check_invariants([table])
    assert sorted(pool.take(2)) == sorted(own)


def test_block_pool_when_full_evicts_least_recently_used() -> None:
    pool = BlockPool(3)
    old, new = chain((1,), (2,)), chain((9,))
    table = [pool.allocate(), pool.allocate()]
    for page, key in zip(table, old, strict=True):
        pool.publish(page, key)
    pool.release(table)
    other = [pool.allocate()]  # the blank page: nothing is evicted yet
    pool.publish(other[0], new[0])
    assert pool.match(old) == table
    pool.release(other)
    pool.allocate()
    assert pool.match(old) == table[:1], "the continuation goes before its prefix"
    pool.allocate()
    assert pool.match(old) == []
    assert pool.match(new) == other


def test_block_pool_with_equal_contents_publishes_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    key = chain((5,))[0]
    pool.publish(first, key)
    pool.publish(second, key)
    assert pool.match([key]) == [first]
    pool.release([second])
    pool.check_invariants([[first]])


def test_block_pool_without_caching_matches_nothing() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    page = pool.allocate()
    pool.publish(page, chain((5,))[0])
    assert pool.match(chain((5,))) == []


def test_block_pool_check_with_a_leak_fails() -> None:
    pool = BlockPool(2)
    page = pool.allocate()
    pool.check_invariants([[page]])
    with pytest.raises(AssertionError):
        pool.check_invariants([])
    with pytest.raises(AssertionError):
        pool.check_invariants([[page], [page]])


def test_block_pool_take_gives_blank_pages_before_cached_ones() -> None:
    pool = BlockPool(4)
    (known,) = pool.take(1)
    pool.publish(known, page_hash(ROOT_HASH, [1, 2]))
    pool.release([known])
    first = pool.take(2)
    assert known not in first
    rest = pool.take(2)
    assert known in rest
    pool.check_invariants([[*first, *rest]])
    assert pool.match([page_hash(ROOT_HASH, [1, 2])]) == []
    assert pool.take(0) == []
