"""Pools, block tables and the cache's tensors, each by itself."""

from __future__ import annotations

import pytest
import torch

from cbasync.kv_cache import BlockManager, BlockTable, KVCache, LeasedPool

# ------------------------------------------------------------------ pools


def test_items_are_taken_from_the_front_and_come_back_at_the_end() -> None:
    pool = LeasedPool(3)
    assert pool.take(2) == [0, 1]
    pool.give_back([0])
    pool.give_back([1], first=True)
    assert pool.take(3) == [1, 2, 0]
    assert pool.take(0) == []
    with pytest.raises(AssertionError, match="1 wanted, 0 free"):
        pool.take(1)


@pytest.mark.parametrize("first", [True, False])
def test_an_item_comes_back_to_its_place_after_a_lease(first: bool) -> None:
    pool = LeasedPool(3)
    pool.give_back(pool.take(1), until_batch=0, first=first)
    assert pool.owner_flags() == "~.."
    pool.collected(0)
    assert pool.take(3) == ([0, 1, 2] if first else [1, 2, 0])


def test_a_lease_ends_with_its_own_batch() -> None:
    """Not with one before it, and not again when a later one is collected."""
    pool = LeasedPool(4)
    one, two, three, _ = pool.take(4)
    pool.give_back([one], until_batch=0)
    pool.give_back([two], until_batch=1)
    pool.give_back([three], until_batch=2)
    assert (pool.num_free, pool.num_leased, pool.num_held) == (0, 3, 1)
    pool.collected(0)
    assert pool.owner_flags() == ".~~o"
    pool.collected(1)
    assert pool.owner_flags() == "..~o"
    assert pool.take(1) == [one]
    pool.collected(2)
    assert pool.owner_flags() == "o..o"


def test_a_batch_that_has_been_collected_is_waited_for_no_more() -> None:
    pool = LeasedPool(2)
    pool.take(2)
    pool.collected(5)
    pool.give_back([0], until_batch=5)
    pool.give_back([1], until_batch=6)
    assert pool.owner_flags() == ".~"


def test_a_request_that_never_ran_gives_back_at_once() -> None:
    """Its last batch is -1, and nothing has been collected yet."""
    pool = LeasedPool(1)
    pool.give_back(pool.take(1), until_batch=-1)
    assert pool.owner_flags() == "."
    pool.give_back(pool.take(1))
    assert pool.owner_flags() == "."
    pool.give_back(pool.take(1), until_batch=0)
    assert pool.owner_flags() == "~"


def test_a_revived_item_has_left_its_lease() -> None:
    pool = LeasedPool(2)
    pool.give_back(pool.take(1), until_batch=0)
    pool.revive(0)
    assert (pool.num_leased, pool.num_held) == (0, 1)
    pool.collected(0)
    assert pool.owner_flags() == "o."
    with pytest.raises(RuntimeError, match="item 0 has an owner already"):
        pool.revive(0)
    pool.revive(1)
    assert pool.owner_flags() == "oo"
    assert not pool.is_free(1)


def test_an_item_revived_and_leased_again_waits_for_the_newer_batch() -> None:
    pool = LeasedPool(1)
    pool.give_back(pool.take(1), until_batch=0)
    pool.revive(0)
    pool.give_back([0], until_batch=1)
    pool.collected(0)
    assert pool.owner_flags() == "~"
    pool.collected(1)
    assert pool.owner_flags() == "."


# ------------------------------------------------------------------ block tables


def test_a_table_grows_by_what_is_missing() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    table = BlockTable()
    assert manager.grow(table, 0) == []
    assert manager.grow(table, 4) == [0]
    assert manager.grow(table, 1) == []  # less than it has: nothing to take or give
    assert manager.grow(table, 9) == [1, 2]
    assert manager.missing(len(table), 4) == 0
    assert len(table) == 3
    assert str(manager) == "ooo.  3 of 4 blocks held"


def test_a_released_table_is_empty_and_can_begin_again() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    table = BlockTable()
    manager.grow(table, 8)
    manager.publish(table, 0, (1, 2, 3, 4))
    manager.release(table, until_batch=3)
    assert (table.block_ids, table.chain) == ([], [])
    assert str(manager) == "~~..  0 of 4 blocks held"
    assert manager.grow(table, 5) == [2, 3]
    manager.pool.collected(3)
    assert str(manager) == "..oo  2 of 4 blocks held"


def test_a_block_with_a_new_owner_is_found_no_more() -> None:
    manager = BlockManager(num_blocks=1, block_size=2)
    table, other = BlockTable(), BlockTable()
    manager.grow(table, 2)
    manager.publish(table, 0, (7, 8))
    assert manager.find([7, 8, 9]) == [0]
    manager.release(table, until_batch=-1)
    assert manager.find([7, 8, 9]) == [0]
    manager.grow(other, 1)
    assert manager.find([7, 8, 9]) == []


def test_two_owners_of_one_block() -> None:
    manager = BlockManager(num_blocks=3, block_size=2)
    table, other = BlockTable(), BlockTable()
    manager.grow(table, 4)
    manager.publish(table, 0, (7, 8))
    manager.adopt(other, manager.find([7, 8, 1]))
    assert manager.grow(other, 3) == [2]
    assert other.block_ids == [0, 2]
    manager.publish(other, 1, (1, 2))  # its name says what comes before it
    assert manager.find([7, 8, 1, 2, 0]) == [0, 2]
    assert manager.find([1, 2, 0]) == []
    manager.release(table, until_batch=-1)
    assert manager.pool.owner_flags() == "o.o"
    manager.release(other, until_batch=-1)
    assert manager.pool.owner_flags() == "..."


def test_a_table_says_how_many_tokens_it_has_room_for() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    table, other = BlockTable(), BlockTable()
    assert table.capacity == 0
    manager.grow(table, 5)
    assert table.capacity == 8
    manager.publish(table, 0, (1, 2, 3, 4))
    manager.adopt(other, [0])
    assert other.capacity == 4
    manager.release(table, until_batch=-1)
    assert table.capacity == 0


def test_a_block_is_named_by_all_that_comes_before_it() -> None:
    """The names of blocks are not their numbers: here they count from 0 and from 1."""
    manager = BlockManager(num_blocks=8, block_size=2)
    table, other = BlockTable(), BlockTable()
    manager.grow(BlockTable(), 1)
    manager.grow(table, 6)
    for index, tokens in enumerate([(1, 2), (3, 4), (5, 6)]):
        manager.publish(table, index, tokens)
    assert manager.find([1, 2, 3, 4, 5, 6, 0]) == table.block_ids == [1, 2, 3]
    manager.adopt(other, table.block_ids[:2])
    assert manager.grow(other, 6) == [4]
    manager.publish(other, 2, (7, 8))
    assert manager.find([1, 2, 3, 4, 7, 8, 0]) == other.block_ids == [1, 2, 4]


def test_without_leases_blocks_change_hands_at_once() -> None:
    manager = BlockManager(num_blocks=1, block_size=2, leases=False)
    table = BlockTable()
    manager.grow(table, 2)
    manager.release(table, until_batch=9)
    assert manager.pool.num_free == 1


# ------------------------------------------------------------------ tensors


def cache(**changes: object) -> KVCache:
    values: dict[str, object] = {
        "num_layers": 2,
        "num_blocks": 3,
        "block_size": 4,
        "num_kv_heads": 2,
        "head_size": 5,
        "dtype": torch.float32,
    }
    return KVCache(**(values | changes))  # type: ignore[arg-type]


def test_the_cache_has_one_block_for_padding() -> None:
    one = cache()
    assert len(one.keys) == len(one.values) == 2
    for tensor in (*one.keys, *one.values):
        assert tensor.shape == (4, 4, 2, 5)
        assert tensor.count_nonzero() == 0
    assert one.padding_position == 12
    assert one.kv_bytes == 2 * 2 * (4 * 4 * 2 * 5) * 4


LAYOUTS = pytest.mark.parametrize("heads_apart", [True, False])


def test_heads_lie_apart_where_the_cpu_reads_them() -> None:
    assert cache().heads_apart
    assert not cache(device="meta").heads_apart
    assert cache(device="meta").keys[0].is_contiguous()


@LAYOUTS
def test_what_is_written_is_gathered_in_the_order_of_the_block_table(
    heads_apart: bool,
) -> None:
    """Three tokens at the KV positions 4 (block 1), 11 (block 2) and 12 (padding)."""
    one = cache(heads_apart=heads_apart, num_kv_heads=3)
    key = torch.arange(45.0).view(3, 3, 5) + 1
    one.write(1, key, -key, one.cells(torch.tensor([4, 11, 12])))
    for place, token in {(1, 0): 0, (2, 3): 1, (3, 0): 2}.items():
        assert one.keys[1][place].equal(key[token])
        assert one.values[1][place].equal(-key[token])
    assert one.keys[1].count_nonzero() == 45
    keys, values = one.gather(1, one.pieces(torch.tensor([[2, 1, 2], [0, 3, 0]])))
    assert keys.shape == values.shape == (2, 3, 12, 5)
    for row, column, token in ((0, 3, 1), (0, 4, 0), (0, 11, 1), (1, 4, 2)):
        assert keys[row, :, column].equal(key[token])
    assert values.equal(-keys)
    assert keys.count_nonzero() == 60
    empty, _ = one.gather(0, one.pieces(torch.tensor([[0, 1, 2, 3]])))
    assert empty.shape == (1, 3, 16, 5)
    assert empty.count_nonzero() == 0


def test_gathering_as_much_again_takes_no_new_memory() -> None:
    """Memory for twice as much is taken when what is there does not suffice."""
    one = cache()
    places = []
    for width in (2, 2, 4, 1, 5, 8, 9):
        table = torch.arange(width).view(1, -1) % 3
        keys, values = one.gather(0, one.pieces(table))
        assert keys.untyped_storage().data_ptr() != values.untyped_storage().data_ptr()
        places.append((len(one._scratch[0]), one._scratch[0].shape[1]))
        assert len(one._scratch[1]) == len(one._scratch[0])
    assert places == [(8, 20)] * 4 + [(20, 20)] * 3


@LAYOUTS
def test_poison_spoils_the_named_blocks_in_every_layer_and_no_other(
    heads_apart: bool,
) -> None:
    one = cache(heads_apart=heads_apart)
    one.poison([0, 2])
    for tensor in (*one.keys, *one.values):
        assert (tensor[[0, 2]] == 1e4).all()
        assert (tensor[[1, 3]] == 0).all()


def test_a_cache_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        one = cache()
    one.write(0, torch.ones(1, 2, 5), torch.ones(1, 2, 5), one.cells(torch.tensor([0])))
    assert one.keys[0][0, 0].eq(1).all()
