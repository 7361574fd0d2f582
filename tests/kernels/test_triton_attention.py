"""Triton's paged attention against softmax written out in float64, in a pool whose other entries are NaN or infinite.
The interpreter takes its time for every program, so shapes are as small as the borders they test allow."""

import importlib
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from kernel_errors import relative_error
from paged_entries import Paged
from torch import Tensor

from d3engine.kernels import reference
from d3engine.kernels.kv_pool import NO_WINDOW

# The package has the operation under this name; here its module is meant.
attention: Any = importlib.import_module("d3engine.kernels.triton.paged_attention")

POISON = -7.25
ERRORS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def split_by(monkeypatch: pytest.MonkeyPatch, entries: int, most: int = 64) -> None:
    monkeypatch.setattr(attention, "SPLIT", entries)
    monkeypatch.setattr(attention, "MOST_SPLITS", most)


def attend_into(out: Tensor, queries: Tensor, pool: Tensor, inputs: Any, scale: float) -> None:
    for launch in attention.attention_launches(out, queries, pool, inputs, scale):
        launch.run()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tiles", "most"),
    [
        pytest.param(2, 2, 8, 64, id="one split"),
        pytest.param(2, 2, 1, 64, id="several"),
        pytest.param(2, 2, 1, 2, id="larger ones"),
        pytest.param(6, 2, 1, 64, id="groups of three heads, several"),
        pytest.param(4, 1, 8, 64, id="one head of keys, one split"),
        pytest.param(4, 1, 1, 2, id="one head of keys, larger ones"),
    ],
)
def test_single_rows_see_all_of_their_entries_and_nothing_else(
    heads: int, kv_heads: int, tiles: int, most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = attention.tune_single_rows(32, heads // kv_heads, 4).tile
    split_by(monkeypatch, tiles * tile, most)
    # At and around the borders of a block, of a tile, and of what a split gets.
    lengths = [1, 15, 16, 17, tile - 1, tile, tile + 1, 3 * tile, 4 * tile + 1, 5 * tile]
    paged = Paged(lengths, heads=heads, kv_heads=kv_heads, device=device)
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[torch.float32]


def test_splits_that_are_joined_in_rounds_keep_their_weights(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts than are loaded together, the largest scores among the last."""
    tile = attention.tune_single_rows(32, 1, 4).tile
    split_by(monkeypatch, tile)
    paged = Paged([20 * tile], device=device)
    keys = paged.pool[paged.tables[0].flip(0)[: tile // 16], 0]
    paged.pool[paged.tables[0].flip(0)[: tile // 16], 0] = 4 * keys
    paged.entries[0][0, -(tile // 16 * 16) :] *= 4
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[torch.float32]


def head_by_head(parts: Any, logs: Any) -> Any:
    """One head's parts [splits, D] by their logarithms [splits], 16 at a time, in the kernel's own order."""
    peak, total, mean = np.float32(-1e38), np.float32(0), np.zeros(parts.shape[1], np.float32)
    for first in range(0, len(logs), 16):
        values, those = np.zeros((16, parts.shape[1]), np.float32), np.full(16, -np.inf, np.float32)
        count = len(logs[first : first + 16])
        values[:count], those[:count] = parts[first : first + 16], logs[first : first + 16]
        new_peak = np.maximum(peak, those.max())
        decay, shares = np.exp2(peak - new_peak), np.exp2(those - new_peak)
        total, mean = total * decay + shares.sum(), mean * decay + (values * shares[:, None]).sum(0)
        peak = new_peak
    return mean / (total if total > 0 else np.float32(1))


@pytest.mark.parametrize(("heads", "kv_heads", "together"), [(4, 1, 4), (4, 1, 2), (3, 1, 4), (1, 1, 1)])
def test_heads_of_a_group_combined_at_once_keep_their_bits(
    heads: int, kv_heads: int, together: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heads of a group are combined at once, each with the bits that it has alone."""
    if device.type != "cpu":
        pytest.skip("a device adds in an order of its layouts")
    split_by(monkeypatch, 16)
    monkeypatch.setattr(attention, "COMBINED", 32 * together)
    paged = Paged([640], heads=heads, kv_heads=kv_heads)  # 40 splits: in three turns, the last of which is not full
    inputs = paged.inputs(attention)
    out = torch.empty(1, heads * 32)
    listing, launch = attention.attention_launches(out, paged.queries, paged.pool, inputs, paged.scale)
    assert launch.arguments["HEADS_TOGETHER"] == together
    listing.run()
    launch.run()
    parts = launch.arguments["partial"].view(40, heads, 32).numpy()
    logs = launch.arguments["lse"].view(40, heads).numpy()
    wanted = np.stack([head_by_head(parts[:, head], logs[:, head]) for head in range(heads)])
    assert np.array_equal(out.view(heads, 32).numpy(), wanted)
    assert relative_error(out, paged.expected()) < ERRORS[torch.float32]


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
def test_rows_of_long_chunks_see_what_stands_at_or_before_them(heads: int, kv_heads: int, device: torch.device) -> None:
    # A whole prompt, a piece behind a cache, pieces that end at a border, more rows than a query tile has.
    paged = Paged([2, 33, 64, 100, 71], [2, 2, 32, 3, 71], heads=heads, kv_heads=kv_heads, device=device)
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[torch.float32]


@pytest.mark.parametrize("window", [1, 16, 17, 45, 129, 1000])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("most", [2, 64])
def test_in_a_window_rows_see_its_entries_alone(
    heads: int, kv_heads: int, window: int, most: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_by(monkeypatch, 32, most)
    given: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "window": window, "device": device}
    paged = Paged([1, 16, 17, 33, 100, 150, 40, 71, 130], [1, 1, 1, 1, 1, 1, 3, 71, 40], **given)
    found = paged.attend(attention)
    assert relative_error(found.cpu(), paged.expected()) < ERRORS[torch.float32]
    paged.pool.nan_to_num_(0.0, 0.0, 0.0)
    assert relative_error(found.cpu(), paged.attend(reference).cpu()) < ERRORS[torch.float32]


@pytest.mark.parametrize("cap", [0.3, 5.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("window", [NO_WINDOW, 45])
def test_scores_are_softly_capped(
    heads: int, kv_heads: int, window: int, cap: float, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_by(monkeypatch, 32)
    given: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "window": window, "cap": cap, "device": device}
    paged = Paged([1, 17, 100, 150, 71], [1, 1, 1, 40, 71], **given)
    found = paged.attend(attention)
    assert relative_error(found.cpu(), paged.expected()) < ERRORS[torch.float32]
    paged.pool.nan_to_num_(0.0, 0.0, 0.0)
    assert relative_error(found.cpu(), paged.attend(reference).cpu()) < ERRORS[torch.float32]


@pytest.mark.parametrize("row_counts", [[1, 1, 5, 1, 40], [40, 1], [1, 40, 1, 1], [2, 1, 2, 1]])
def test_chunks_of_one_row_and_of_many_share_a_batch(row_counts: list[int], device: torch.device) -> None:
    lengths = [40 + 9 * nth for nth in range(len(row_counts))]
    paged = Paged(lengths, row_counts, heads=4, device=device)
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[torch.float32]


@pytest.mark.parametrize("block_size", [1, 2, 32, 64, 256])
@pytest.mark.parametrize("heads", [1, 2])
def test_a_tile_may_cover_many_blocks_or_part_of_one(heads: int, block_size: int, device: torch.device) -> None:
    lengths = [150, 1, block_size + 1]
    paged = Paged(lengths, [1, 1, 2], heads=heads, kv_heads=1, block_size=block_size, device=device)
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[torch.float32]


@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "dtype"), [(1, torch.float32), (4, torch.float16), (4, torch.bfloat16)])
def test_head_sizes_and_dtypes(heads: int, dtype: torch.dtype, channels: int, device: torch.device) -> None:
    paged = Paged(
        [attention.SPLIT + 6, 5], [1, 5], heads=heads, kv_heads=1, channels=channels, dtype=dtype, device=device
    )
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[dtype]


@pytest.mark.parametrize("split", [64, 256])
@pytest.mark.parametrize("heads", [2, 4])
def test_rows_beyond_the_active_count_stay_untouched(
    heads: int, split: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows from the active count on stay untouched bit for bit."""
    split_by(monkeypatch, split)
    paged = Paged([200, 70, 9, 33], heads=heads, device=device)
    expected, inputs = paged.expected(), paged.inputs(attention)
    for active in (0, 1, 3, 4):
        inputs.num_rows.fill_(active)  # as a graph does: same launch, other number
        out = torch.full((4, heads * 32), POISON, device=device)
        attend_into(out, paged.queries, paged.pool, inputs, paged.scale)
        assert bool((out[active:] == POISON).all())
        if active:
            assert relative_error(out[:active].cpu(), expected[:active]) < ERRORS[torch.float32]


def test_long_chunks_beyond_the_active_count_stay_untouched(device: torch.device) -> None:
    paged = Paged([50, 60, 40], [1, 20, 12], heads=4, device=device)
    out = torch.full((33, 4 * 32), POISON, device=device)
    count = torch.tensor([21], dtype=torch.int64, device=device)
    for from_here in (replace(paged.inputs(attention), num_rows=count), paged.inputs(attention)):
        attend_into(out, paged.queries, paged.pool, from_here, paged.scale)
        rows = int(from_here.num_rows)
        assert bool((out[rows:] == POISON).all())
        assert relative_error(out[:rows].cpu(), paged.expected()[:rows]) < ERRORS[torch.float32]
    part = attention.paged_attention(paged.queries, paged.pool, paged.inputs(attention), paged.scale, num_rows=count)
    assert torch.equal(part[:21], out[:21])


def test_one_launch_serves_changed_tables_and_lengths(device: torch.device) -> None:
    """One launch serves changed tables and lengths as a graph replays it."""
    # Persistent buffers larger than the batch: more chunks and blocks than are used, and parts full of NaN.
    first, second = Paged([300, 20, 33], heads=4, device=device), Paged([64, 250], heads=4, device=device)
    tables = torch.full((4, 32), 10**6, dtype=torch.int32, device=device)  # a block id that must never be followed
    inputs = attention.AttentionInputs(
        query_starts=torch.arange(5, dtype=torch.int64, device=device),
        kv_lengths=torch.full((4,), 512, dtype=torch.int64, device=device),
        block_tables=tables,
        num_rows=torch.zeros(1, dtype=torch.int32, device=device),
        max_kv_length=512,
        max_chunk_rows=1,
        single_rows=True,
    )
    pool = torch.full((64, *first.pool.shape[1:]), torch.nan, device=device)
    queries = torch.full((4, 4, 32), torch.nan, device=device)
    out = torch.full((4, 4 * 32), POISON, device=device)
    launches = attention.attention_launches(out, queries, pool, inputs, first.scale)
    parts, counters = launches[1].arguments["partial"], launches[1].arguments["counters"]
    for paged in (first, second):
        count = len(paged.lengths)
        out.fill_(POISON)
        parts.fill_(torch.nan)
        pool.fill_(torch.nan)
        pool[: len(paged.pool)] = paged.pool
        queries[:count] = paged.queries
        inputs.kv_lengths[:count] = torch.tensor(paged.lengths)
        for chunk, length in enumerate(paged.lengths):
            used = -(-length // 16)
            tables[chunk] = 10**6
            tables[chunk, :used] = paged.tables[chunk, :used]
        inputs.num_rows.fill_(count)
        for launch in launches:
            launch.run()
        assert relative_error(out[:count].cpu(), paged.expected()) < ERRORS[torch.float32]
        assert bool((out[count:] == POISON).all())
        assert not parts.isnan().all(), "the case is meant to split"
        assert not counters.any()


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_alone_and_among_others_has_the_same_bits(
    dtype: torch.dtype, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row gets the same bits alone and among others, by few programs or many."""
    lengths = [300, 20, 129]
    paged = Paged(lengths, heads=heads, dtype=dtype, device=device)
    together = paged.attend(attention)
    for row, length in enumerate(lengths):
        tables = paged.tables[None, row : row + 1]
        (inputs,) = attention.attention_inputs([0, 1], [length], tables)
        alone = attention.paged_attention(paged.queries[row : row + 1], paged.pool, inputs, paged.scale)
        assert torch.equal(alone[0], together[row])
    monkeypatch.setattr(attention, "processors_of", lambda _: 1)
    _, launch = attention.attention_launches(together, paged.queries, paged.pool, paged.inputs(attention), paged.scale)
    assert launch.grid[0] in (2, 3)  # of 12 splits
    assert torch.equal(paged.attend(attention), together)


@pytest.mark.parametrize("window", [NO_WINDOW, 40])
@pytest.mark.parametrize("turn", [3, 200])
def test_splits_are_listed_in_the_order_of_their_rows(
    turn: int, window: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list has each split of each chunk of one row once, in turns that each begin with their number."""
    split_by(monkeypatch, 16, most=4)
    lengths = [1, 15, 16, 17, 0, 33, 900, 64, 65, 128] + [20] * 140
    sizes = [1, 1, 2, 1, 1, 1, 1, 3, 1, 1] + [1] * 140
    starts = [0, *accumulate(sizes)]
    turn, most = min(turn, len(lengths)), 4
    numbers = torch.tensor(starts + lengths, dtype=torch.int32, device=device)
    counters = torch.full((turn * 3,), 7, dtype=torch.int32, device=device)
    listed, launch = attention.list_launch(numbers[:151], numbers[151:], counters, turn, most, 3, window)
    listed.fill_(-1)
    launch.run()
    assert not counters.any()
    for nth, first in enumerate(range(0, len(lengths), turn)):
        wanted = []
        for chunk in range(first, min(first + turn, len(lengths))):
            if sizes[chunk] != 1:
                continue
            read = lengths[chunk] - max(lengths[chunk] - window, 0) // 16 * 16
            size = max(1, -(-read // (16 * most))) * 16
            wanted += [[chunk - first, starts[chunk], lengths[chunk], split] for split in range(-(-read // size))]
        assert listed[nth, 0, 0] == len(wanted)
        assert listed[nth, 1 : 1 + len(wanted)].tolist() == wanted
        assert bool((listed[nth, 1 + len(wanted) :] == -1).all())


def test_layers_of_a_step_share_one_list_of_splits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer with a window lists the splits, and the others read the same memory."""
    paged = Paged([300, 20, 129], heads=4, device=device)
    both = attention.attention_inputs(paged.starts, paged.lengths, paged.tables.expand(2, *paged.tables.shape))
    found = [attention.paged_attention(paged.queries, paged.pool, inputs, paged.scale) for inputs in both]
    assert torch.equal(*found)
    (listed,) = both[0].room.listed.values()
    listed[0, 0] = 0  # no splits, for the layers behind
    out = attention.paged_attention(paged.queries, paged.pool, both[1], paged.scale)
    assert not torch.equal(out, found[0])
    attention.paged_attention(paged.queries, paged.pool, both[1], paged.scale, window=50)
    assert len(both[0].room.listed) == 2


def test_two_tables_may_name_one_block(device: torch.device) -> None:
    paged = Paged([48, 48, 40], [1, 1, 3], heads=4, device=device)
    paged.tables[1:, :2] = paged.tables[0, :2]
    for entries in paged.entries[1:]:
        entries[:, :32] = paged.entries[0][:, :32]
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[torch.float32]


def test_queries_may_be_the_front_of_wider_rows(device: torch.device) -> None:
    paged = Paged([20, 30], [1, 7], heads=2, device=device)
    expected = paged.attend(attention)
    wide = torch.full((8, 6, 32), torch.nan, device=device)
    wide[:, :2] = paged.queries
    paged.queries = wide[:, :2]
    assert torch.equal(paged.attend(attention), expected)


def test_more_chunks_than_one_search_looks_at(device: torch.device) -> None:
    row_counts = [1] * 130 + [3, 2, 1]
    paged = Paged([3] * 133, row_counts, heads=1, kv_heads=1, channels=16, block_size=4, device=device)
    assert relative_error(paged.attend(attention).cpu(), paged.expected()) < ERRORS[torch.float32]
    out = torch.full((136, 16), POISON, device=device)
    attend_into(out, paged.queries, paged.pool, replace(paged.inputs(attention), single_rows=False), paged.scale)
    assert bool((out[:130] == POISON).all())
    assert bool((out[135:] == POISON).all())


def test_a_query_finds_its_key_among_extreme_scores(device: torch.device) -> None:
    """Scores of -3e4 and 3e4: only a running maximum survives them, in whichever tile the largest stands."""
    for heads in (1, 2):
        for best in (0, 70, 299):
            paged = Paged([300], heads=heads, kv_heads=1, device=device)
            keys = torch.full((300, 32), -1.0)
            keys[best] = 1.0
            positions = torch.arange(300)
            paged.pool[paged.tables[0, positions // 16], 0, positions % 16, 0] = keys.to(device)
            paged.queries.fill_(5e3)
            value = paged.entries[0][1, best, 0].float().to(device)
            torch.testing.assert_close(paged.attend(attention), value.repeat(1, heads))


def test_block_offsets_do_not_wrap_at_31_bits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool of 2^32 elements, of which a few pages are touched and the rest is never backed by memory."""
    if device.type == "cpu":
        from triton.runtime.interpreter import GridExecutor

        # The interpreter would copy all arguments back, onto themselves on a CPU: that would touch every page.
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
    small = Paged([33, 20], [1, 4], heads=4, channels=128, block_size=64, dtype=torch.float16, device=device)
    expected = small.attend(attention)
    try:
        pool = torch.empty(2**32 // small.pool[0].numel(), *small.pool.shape[1:], dtype=torch.float16, device=device)
    except RuntimeError as error:
        pytest.skip(f"no address space for 8 GB: {error}")
    far = torch.tensor([len(pool) // 2 + 1, len(pool) - 1], device=device)
    pool[far] = small.pool[small.tables[:, 0]]
    small.pool, small.tables = pool, far.unsqueeze(1)
    assert torch.equal(small.attend(attention), expected)


def test_an_empty_batch_launches_nothing(device: torch.device) -> None:
    pool = torch.zeros(2, 2, 16, 2, 32, device=device)
    (inputs,) = attention.attention_inputs([0], [], torch.zeros(1, 0, 0, dtype=torch.int64, device=device))
    queries = torch.zeros(0, 4, 32, device=device)
    assert attention.paged_attention(queries, pool, inputs, 1.0).shape == (0, 128)
    assert attention.attention_launches(queries.flatten(1), queries, pool, inputs, 1.0) == []


@pytest.mark.parametrize("block_size", [3, 48])
def test_a_block_size_that_is_no_power_of_two_is_refused_by_name(block_size: int, device: torch.device) -> None:
    paged = Paged([5], block_size=block_size, device=device)
    with pytest.raises(ValueError, match=rf"block_size must be .*; got {block_size}"):
        paged.attend(attention)


@pytest.mark.parametrize(("chunks", "longest", "programs"), [(1, 128, 2), (1, 513, 10), (3, 129, 12), (64, 4096, 396)])
def test_programs_are_no_more_than_splits_or_places(chunks: int, longest: int, programs: int) -> None:
    """There are no more programs than splits nor than have a place."""
    pool = torch.empty(8, 2, 16, 2, 32, device="meta")
    queries, numbers = torch.empty(chunks, 2, 32, device="meta"), torch.empty(chunks + 1, device="meta")
    tables = torch.empty(chunks, 8, device="meta")
    inputs = attention.AttentionInputs(numbers, numbers[:chunks], tables, numbers[:1], longest, 1, True)
    listing, launch = attention.attention_launches(queries.flatten(1), queries, pool, inputs, 1.0)
    assert (listing.grid, launch.grid) == ((chunks,), (programs,))
