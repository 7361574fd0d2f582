"""Drafts by a second model and by lookups: by any drafter, at any length, tokens and logits are those without."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from native_models import Case, Shape, isas

from d3engine.kernels.native.model import NativeError
from d3engine.kernels.native.runs import Draws, LogitMask, Rows, RowSampling, TokenCounts
from d3engine.kernels.native.speculative_loop import DraftCosts, Drafter, Drafts, LoopLogits, TextDrafts

SHAPE = Shape(layers=3, rows=4, max_positions=96, hidden=48, intermediate=64, vocab=96)
WHOLE = RowSampling(-np.inf, 1.0, 0, 1.0, 0.0, 0.0, None)
CUT = [WHOLE, RowSampling(-3.0, 0.9, 20, 1.0, 0.0, 0.0, None), WHOLE, RowSampling(-np.inf, 1.0, 5, 1.0, 0.0, 0.0, None)]
DRAWS = Draws(np.array([0, 0.9, 1.3, 0.7], np.float32), np.array([3, 4, 5, 6]), np.array([0, 1, 0, 2]), CUT)
POSITIONS, ROOMS, MOST = np.array([7, 12, 0, 30]), np.array([40, 33, 50, 9]), 5
NEVER = 2**31 - 1
MODEL, LOOKUP = int(Drafter.DRAFT_MODEL), int(Drafter.LOOKUP)


class Pair:
    """A target, and a draft model that is the same but for noise in its head; both have computed the texts."""

    def __init__(self, noise: float, seed: int = 0, isa: str = "auto", head_tokens: Any = None, rows: int = 64) -> None:
        self.target, self.draft = Case(replace(SHAPE, seed=seed)), Case(replace(SHAPE, seed=seed))
        if noise:
            assert isinstance(self.draft.model.lm_head, torch.Tensor)
            self.draft.model.lm_head.add_(torch.randn_like(self.draft.model.lm_head) * noise)
        if head_tokens is not None:
            tokens = torch.tensor(head_tokens)
            head = self.draft.model.lm_head[tokens]
            self.draft.model = replace(self.draft.model, lm_head=head, head_tokens=tokens)
        self.decoder, self.drafter = self.target.decoder(isa=isa), self.draft.decoder(isa=isa, max_rows=rows)
        numbers = np.random.default_rng(seed)
        self.texts = numbers.integers(SHAPE.vocab, size=(4, 96))
        for row, stop in enumerate(POSITIONS):  # all tokens but the last are in the target's cache
            if stop:
                self.decoder.run(self._rows(np.full(stop, row), np.arange(stop)), 1)
        self.entries = self.target.pool.clone()

    def _rows(self, slots: Any, positions: Any, generation: Any = None, texts: Any = None) -> Rows:
        tokens = (self.texts if texts is None else texts)[slots, positions]
        generation = np.zeros(len(tokens), np.int64) if generation is None else generation
        return Rows(tokens, positions, generation, slots, np.full((len(tokens), 3), NEVER), self.target.rows.tables)

    def first_rows(self) -> Rows:
        return self._rows(np.arange(4), POSITIONS, np.arange(1, 5))

    def loop(self, rows: Rows, rooms: Any, cycles: int, by_text: Any, **options: Any) -> Any:
        """Iterations of rows whose drafts have not begun: by the draft model, but where `by_text` says otherwise."""
        none, most, begun = np.zeros(len(rooms), np.int64), np.full(len(rooms), MOST), np.zeros((len(rooms), MOST))
        drafts = Drafts(begun, none, np.minimum(most, rooms - 1), most, most, none, rooms, none - 1)
        given: Any = {"drafters": none + MODEL, "texts": np.ascontiguousarray(self.texts)}
        given |= {"history": none[:0], "tables": self.draft.rows.tables, "positions": none} | by_text
        options = {"draft_model": self.drafter, "by_text": TextDrafts(**given)} | options
        return self.decoder.run_speculative_loop(
            rows, cycles, drafts, np.zeros((1, SHAPE.hidden), np.float32), **options
        )

    def plain(self, ends: Any = None, draws: Draws | None = DRAWS) -> tuple[list[list[int]], Any]:
        """The answers without drafts, each up to its end, and the logits of all steps."""
        self.target.pool.copy_(self.entries)
        steps = int(ROOMS.max())
        logits = np.empty((steps, 4, SHAPE.vocab), np.float32)
        tokens = self.decoder.run(self.first_rows(), steps, draws=draws, logits=logits)[0]
        answers = [tokens[: ROOMS[row], row].tolist() for row in range(4)]
        for row, answer in enumerate(answers):
            stop = next((nth for nth, token in enumerate(answer) if ends is not None and token in ends[row]), None)
            answers[row] = answer if stop is None else answer[: stop + 1]
        return answers, logits

    def drafted(self, drafters: Any, ends: Any = None, draws: Draws | None = DRAWS, **further: Any) -> Any:
        """The answers of calls of a loop, one after the other, and all counts."""
        self.target.pool.copy_(self.entries)
        texts, positions, rooms, computed = self.texts.copy(), POSITIONS.copy(), ROOMS.copy(), np.zeros(4, np.int64)
        answers: list[list[int]] = [[] for _ in range(4)]
        self.counts: list[Any] = []
        live = np.arange(4)
        while live.size:
            by_text = {
                "drafters": np.array(drafters)[live],
                "texts": np.ascontiguousarray(texts[live]),
                "history": np.array([5, 6, -1, 7]),
                "positions": np.minimum(computed, positions)[live],
            } | further
            rows = self._rows(live, positions[live], live + 1 + positions[live] - POSITIONS[live], texts)
            own = None
            if draws is not None:
                arrays = (getattr(draws, name)[live] for name in ("temperatures", "seeds", "indices"))
                own = Draws(*arrays, [CUT[row] for row in live])
            own_ends = None if ends is None else ends[live]
            found, counts = self.loop(rows, rooms[live], 3, by_text, draws=own, ends=own_ends)
            self.counts.append(counts)
            for place, row in enumerate(live.tolist()):
                for tokens, (_, accepted, last, _, known) in zip(found[:, place], counts[:, place], strict=True):
                    if accepted < 0:
                        continue
                    new = [*tokens[:accepted].tolist(), int(last)]
                    stop = [nth for nth, token in enumerate(new) if ends is not None and token in ends[row]]
                    new = new[: stop[0] + 1] if stop else new
                    answers[row] += new
                    texts[row, positions[row] + 1 : positions[row] + 1 + len(new)] = new
                    positions[row] += len(new)
                    rooms[row] -= len(new)
                    computed[row] = known
            going = [not (ends is not None and set(ends[row]) & set(answers[row])) for row in live]
            live = live[(rooms[live] > 0) & going]
        return answers

    def num(self, what: int, drafter: int | None = None) -> int:
        """The sum of the drafted (0) or accepted (1) tokens, all or those of a drafter."""
        counts = np.concatenate([one.reshape(-1, 5) for one in self.counts])
        which = (counts[:, 0] >= 0) & ((counts[:, 3] == drafter) if drafter is not None else True)
        return int(counts[which, what].sum())


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("noise", [0, 0.05, 3.0])
def test_a_draft_model_changes_no_token(isa: str, noise: float) -> None:
    pair = Pair(noise, isa=isa)
    wanted, _ = pair.plain()
    assert pair.drafted([MODEL, MODEL, MODEL, MODEL]) == wanted
    rate = pair.num(1) / pair.num(0)
    assert rate == 1 if noise == 0 else rate < 1
    assert pair.num(0, MODEL) == pair.num(0) > 0


def test_the_draft_draws_with_the_noise_of_its_target() -> None:
    """Equal models agree on all drawn tokens, and similar ones far more often than by chance."""
    pair = Pair(0.05)
    pair.drafted([MODEL] * 4)
    assert pair.num(1) / pair.num(0) > 0.2


def test_ends_and_rows_without_drafts_are_respected() -> None:
    pair = Pair(0.05, seed=1)
    free, _ = pair.plain()
    ends = np.array([[free[0][6], -1], [free[1][1], free[1][9]], [-1, -1], [free[3][0], -1]])
    wanted, _ = pair.plain(ends)
    assert pair.drafted([MODEL, 0, MODEL | LOOKUP, LOOKUP], ends) == wanted


def test_a_shortened_head_drafts_its_own_tokens_alone() -> None:
    tokens = list(range(0, 96, 2))
    pair = Pair(0, head_tokens=tokens)
    wanted, _ = pair.plain()
    assert pair.drafted([MODEL] * 4) == wanted
    assert 0 < pair.num(1) < pair.num(0)
    with pytest.raises(NativeError):  # nothing but drafts
        pair.drafter.run(pair.draft.rows, 1, logits=np.empty((1, 4, 96), np.float32))
    with pytest.raises(NativeError, match="do not fit"):
        Pair(0, head_tokens=[4, 2, 6])


def test_a_shortened_head_takes_masks_and_penalties() -> None:
    """It chooses as the whole head does that may choose its tokens alone."""
    pair = Pair(0, head_tokens=list(range(0, 96, 2)))
    counts = TokenCounts.of([1, 2, 3, 4, 10], [4, 6, 6, 7])
    rows = pair._rows(np.arange(4), np.zeros(4, np.int64), np.arange(1, 5))
    found = []
    for decoder, head in ((pair.drafter, range(96)), (pair.decoder, range(0, 96, 2))):
        asked: list[RowSampling | None] = []
        for row in range(4):
            allowed = np.isin(np.arange(96), head) & (np.arange(96) % 5 != row)
            mask = LogitMask(
                np.array([4, 5, 90]),
                np.array([3, 50, 4], np.float32),
                np.packbits(allowed, bitorder="little"),
                np.array([row * 2, 11]),
                row,  # a generation step
                None,
                [],
            )
            asked.append(RowSampling(-2.0 if row else -np.inf, 1.0, 9 * (row > 1), 1.4, 0.5, 0.3, counts, mask))
        draws = Draws(np.array([0, 1, 2, 0.5], np.float32), np.arange(4), np.arange(4), asked)
        found.append(decoder.run(rows, 1, draws=draws))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_lookups_follow_the_text_and_change_no_token() -> None:
    pair = Pair(0, seed=2)
    pair.texts[:, :31] = np.tile([4, 9, 13, 9, 2], 7)[:31]
    wanted, _ = pair.plain(draws=None)
    assert pair.drafted([LOOKUP] * 4, draws=None) == wanted
    assert pair.num(0, MODEL) == 0
    assert pair.num(0, LOOKUP) > 0


def test_lookups_find_what_repeats() -> None:
    """A model whose head sees the last token alone goes in circles, which a lookup sees after one round."""
    pair = Pair(0, seed=3)
    for case in (pair.target, pair.draft):
        for layer in case.model.layers:
            layer.output.weight.zero_()
            layer.down.weight.zero_()
    wanted, _ = pair.plain(draws=None)
    assert pair.drafted([LOOKUP] * 4, draws=None) == wanted
    assert pair.num(1) > 0.5 * pair.num(0) > 0


@pytest.mark.parametrize("draft", [1e-6, 0.5])
@pytest.mark.parametrize("rows", [{1: 1e-3, 8: 1.1e-3}, {1: 1e-3, 8: 8e-3}])
def test_chosen_lengths_change_no_token(draft: float, rows: dict[int, float]) -> None:
    pair = Pair(0.05, seed=4)
    costs = DraftCosts.of(rows, {1: draft})
    wanted, _ = pair.plain()
    assert pair.drafted([MODEL, MODEL | LOOKUP, LOOKUP, MODEL], costs=costs) == wanted
    if draft > 0.1:
        assert pair.num(0, MODEL) == 0, "a draft model that costs hundreds of steps is not even probed"
    elif rows[8] < 2e-3:  # the first drafts pay; later ones go by the times of this machine
        assert pair.num(0, MODEL) > 0
        assert sum(costs.judged[0]) > 0


def test_logits_are_those_without_drafts() -> None:
    pair = Pair(0.05, seed=5)
    _, logits = pair.plain(draws=None)
    pair.target.pool.copy_(pair.entries)
    made = LoopLogits(np.full((4, 4, MOST + 1, 96), np.nan, np.float32), np.array([1, 0, 1, 1], np.uint8))
    _, counts = pair.loop(pair.first_rows(), np.full(4, 40), 4, {}, logits=made)
    for row in (0, 2, 3):
        taken = np.concatenate([made.logits[nth, row, : counts[nth, row, 1] + 1] for nth in range(4)])
        np.testing.assert_array_equal(taken, logits[: len(taken), row])
    assert np.isnan(made.logits[:, 1]).all()


def test_a_text_longer_than_a_step_is_caught_up_with_in_parts() -> None:
    pair = Pair(0, rows=6)
    wanted, _ = pair.plain()
    assert pair.drafted([MODEL] * 4) == wanted
    assert pair.num(1) == pair.num(0)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "texts that are too short": ("missing or too short", {"texts": np.zeros((4, 33), np.int64)}),
    "no tables of the draft model": ("missing or too short", {"tables": None}),
    "a draft model that is ahead": ("a position is outside", {"positions": np.full(4, 90)}),
    "a token of another vocabulary": ("a token id is outside", {"texts": np.full((4, 96), 96)}),
    "a history of another vocabulary": ("a token id is outside", {"history": np.array([3, 96])}),
    "a table without a block": ("no block of the pool", {"tables": np.zeros((4, 3, 24), np.int32)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_lies_out_of_bounds_is_refused(name: str) -> None:
    message, changes = WRONG[name]
    pair = Pair(0)
    before = pair.target.pool.clone(), pair.draft.pool.clone()
    with pytest.raises(NativeError, match=message):
        pair.loop(pair.first_rows(), np.full(4, 9), 2, changes)
    assert torch.equal(before[0], pair.target.pool)
    assert torch.equal(before[1], pair.draft.pool)


def test_a_model_cannot_draft_for_itself_with_one_decoder() -> None:
    pair = Pair(0)
    with pytest.raises(NativeError, match="at work"):
        pair.loop(pair.first_rows(), np.full(4, 9), 2, {}, draft_model=pair.decoder)
    pair.loop(pair.first_rows(), np.full(4, 9), 2, {})  # and neither is left locked
    pair.drafter.run(pair.draft.rows, 1)
