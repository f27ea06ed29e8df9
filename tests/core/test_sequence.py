"""The decoding state of a request, and the plans made of several, without any model."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from dflash_core import plans
from dflash_core.messages import DraftPlan, Features, Span, VerifyPlan, VerifyResult
from dflash_core.request import GenerationOutput, GenerationRequest
from dflash_core.sequence import ContextPiece, DraftJob, Sequence
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping

K, CHUNK, WIDTH = 3, 4, 2
STOP = 99
TOKENIZER = Tokenizer(WordLevel({f"word{i}": i for i in range(100)}, unk_token="word0"))
SHAPES = StaticShapes.create(num_slots=4, max_model_len=32, num_drafts=K, prefill_chunk=CHUNK)


def new_sequence(
    prompt: list[int], *, slot: int = 0, max_tokens: int = 100, max_model_len: int = 32
) -> Sequence:
    request = GenerationRequest("test", prompt, max_tokens, stop_token_ids=(STOP,))
    stopping = Stopping(TOKENIZER, request, eos_token_ids=(), max_model_len=max_model_len)
    return Sequence(prompt, slot=slot, stopping=stopping, max_model_len=max_model_len)


def features(*values: int) -> Features:
    """One row of WIDTH float32 per value, all of that value."""
    rows = np.repeat(np.array(values, dtype=np.float32)[:, None], WIDTH, axis=1)
    return Features(rows.reshape(-1).view(np.uint8), len(values), WIDTH, "float32")


def values(packed: Features | None) -> list[int]:
    if packed is None:
        return []
    return packed.data.view(np.float32).reshape(packed.rows, WIDTH)[:, 0].astype(int).tolist()


def positions(piece: ContextPiece) -> range:
    return range(piece.start, piece.start + piece.features.rows)


def step(sequence: Sequence, emitted: list[int]) -> GenerationOutput | None:
    """One step of this sequence alone; the feature of position p has the value p."""
    block = sequence.next_block(K, CHUNK)
    committed = len(block) if sequence.prefilling else len(emitted)
    start = sequence.num_computed
    return sequence.commit(block, emitted, features(*range(start, start + committed)))


def decoding(**options: int) -> Sequence:
    """Past its prompt of 5 tokens, with a drafter, all context taken; the newest token is 10."""
    sequence = new_sequence([1, 2, 3, 4, 5], **options)
    sequence.attach_drafter(7)
    step(sequence, [0])
    step(sequence, [10])
    sequence.take_draft_job()
    return sequence


class TestPrefill:
    @pytest.mark.parametrize(
        ("length", "chunks"),
        [(1, [1]), (3, [3]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (9, [4, 4, 1])],
    )
    def test_the_prompt_runs_in_chunks_and_only_the_last_gives_a_token(
        self, length: int, chunks: list[int]
    ) -> None:
        prompt = list(range(20, 20 + length))
        sequence = new_sequence(prompt)
        blocks, outputs = [], []
        while sequence.prefilling:
            blocks.append(sequence.next_block(K, CHUNK))
            outputs.append(step(sequence, [7]))
        assert list(map(len, blocks)) == chunks
        assert sum(blocks, []) == prompt
        assert outputs[:-1] == [None] * (len(chunks) - 1)
        assert outputs[-1] is not None and outputs[-1].token_ids == [7]
        assert sequence.tokens == [*prompt, 7]

    def test_the_first_token_is_not_a_decode_step(self) -> None:
        sequence = new_sequence([1, 2])
        step(sequence, [7])
        assert (sequence.statistics.num_steps, sequence.statistics.num_tokens) == (0, 0)

    def test_the_first_token_may_be_the_last(self) -> None:
        for sequence, first, reason in (
            (new_sequence([1, 2], max_tokens=1), 7, "length"),
            (new_sequence([1, 2]), STOP, "stop"),
        ):
            output = step(sequence, [first])
            assert output is not None and output.finish_reason == reason
            assert sequence.finished


class TestDecode:
    def test_a_block_is_the_newest_token_and_its_drafts(self) -> None:
        sequence = decoding()
        assert sequence.next_block(K, CHUNK) == [10]
        assert sequence.offer_drafts(5, [11, 12, 13])
        assert sequence.next_block(K, CHUNK) == [10, 11, 12, 13]
        assert sequence.num_computed == sequence.position == 5

    @pytest.mark.parametrize("accepted", [0, 1, 2, 3])
    def test_accepted_drafts_and_the_bonus_token_are_taken_and_the_rest_forgotten(
        self, accepted: int
    ) -> None:
        sequence = decoding()
        sequence.offer_drafts(5, [11, 12, 13])
        emitted = [11, 12, 13][:accepted] + [50]
        output = step(sequence, emitted)
        assert output is not None and output.token_ids == emitted
        assert sequence.tokens == [1, 2, 3, 4, 5, 10, *emitted]
        assert sequence.num_computed == sequence.position == 6 + accepted
        assert sequence.next_block(K, CHUNK) == [50], "used drafts must not be used again"
        assert sequence.statistics.num_draft_tokens == 3
        assert sequence.statistics.num_accepted_tokens == accepted

    def test_nothing_after_a_stop_inside_a_block_is_kept_or_counted(self) -> None:
        sequence = decoding()
        sequence.offer_drafts(5, [11, STOP, 13])
        output = step(sequence, [11, STOP, 13, 50])
        assert output is not None and output.token_ids == [11, STOP]
        assert output.finish_reason == "stop"
        assert sequence.finished and sequence.tokens[-2:] == [11, STOP]
        statistics = sequence.statistics
        assert (statistics.num_accepted_tokens, statistics.num_tokens) == (2, 2)
        assert output.statistics == statistics.as_dict()

    def test_a_bonus_token_that_stops_is_not_an_accepted_draft(self) -> None:
        sequence = decoding()
        sequence.offer_drafts(5, [11, 12, 13])
        step(sequence, [11, STOP])
        assert sequence.statistics.num_accepted_tokens == 1


class TestRoom:
    """The block and its bonus token stay within `max_tokens`, the block within the context."""

    @pytest.mark.parametrize(("max_tokens", "room"), [(2, 0), (3, 1), (4, 2), (27, 25)])
    def test_drafts_that_max_tokens_would_cut_are_not_made(
        self, max_tokens: int, room: int
    ) -> None:
        # One token is out, the bonus token takes one more.
        assert decoding(max_tokens=max_tokens).draft_room == room

    @pytest.mark.parametrize(("max_model_len", "room"), [(7, 0), (8, 1), (9, 2), (10, 3)])
    def test_no_position_beyond_the_context_is_written(self, max_model_len: int, room: int) -> None:
        sequence = decoding(max_model_len=max_model_len)
        assert sequence.draft_room == room
        sequence.offer_drafts(5, [11, 12, 13])
        block = sequence.next_block(K, CHUNK)
        assert block == [10, 11, 12, 13][: 1 + room]
        assert sequence.num_computed + len(block) <= max_model_len
        output = step(sequence, [*block[1:], 50])
        assert output is not None and output.token_ids == [*block[1:], 50]
        assert sequence.finished == (len(sequence.tokens) == max_model_len)

    def test_the_last_token_before_a_limit_is_not_drafted_for(self) -> None:
        for limits in ({"max_model_len": 7}, {"max_tokens": 2}):
            sequence = decoding(**limits)
            sequence.attach_drafter(7)
            assert sequence.take_draft_job() is None
            output = step(sequence, [50])
            assert output is not None and output.finish_reason == "length"

    def test_a_prompt_that_fills_the_context_but_one_gives_exactly_one_token(self) -> None:
        sequence = new_sequence(list(range(31)))
        while sequence.prefilling:
            output = step(sequence, [7])
        assert output is not None and output.finish_reason == "length"
        assert len(sequence.tokens) == 32


class TestDrafter:
    def test_features_of_a_piece_of_the_prompt_are_injected_without_asking(self) -> None:
        sequence = new_sequence([1, 2, 3, 4, 5])
        sequence.attach_drafter(7)
        step(sequence, [0])
        job = sequence.take_draft_job()
        assert job is not None and job.token is None
        assert [positions(piece) for piece in job.context] == [range(4)]

    def test_every_committed_position_is_injected_once_in_order(self) -> None:
        sequence = new_sequence([1, 2, 3, 4, 5])
        sequence.attach_drafter(7)
        injected = []
        for drafts, emitted in (
            ([], [0]),
            ([], [10]),
            ([11, 12, 13], [11, 50]),
            ([], [51]),
            ([52, 53, 54], [52, 53, 54, 55]),
        ):
            sequence.offer_drafts(sequence.position, drafts)
            step(sequence, emitted)
            job = sequence.take_draft_job()
            assert job is not None and job.slot == 7 and job.context_start == 0
            for piece in job.context:
                assert values(piece.features) == list(positions(piece))
                injected += positions(piece)
            if job.token is not None:
                assert job.start == sequence.position == len(injected)
                assert job.token == sequence.tokens[-1] == emitted[-1]
        assert injected == list(range(len(sequence.tokens) - 1))

    def test_features_pile_up_while_nobody_takes_them(self) -> None:
        sequence = decoding()
        for token in (50, 51, 52):
            step(sequence, [token])
        job = sequence.take_draft_job()
        assert job is not None and (job.token, job.start) == (52, 8)
        assert [positions(piece) for piece in job.context] == [
            range(5, 6),
            range(6, 7),
            range(7, 8),
        ]
        again = sequence.take_draft_job()
        assert again is not None and again.context == ()

    def test_drafts_that_come_too_late_are_refused(self) -> None:
        sequence = decoding()
        job = sequence.take_draft_job()
        assert job is not None
        step(sequence, [50])
        assert not sequence.offer_drafts(job.start, [11, 12, 13])
        assert sequence.next_block(K, CHUNK) == [50]

    def test_drafts_for_a_finished_sequence_are_refused(self) -> None:
        sequence = decoding()
        step(sequence, [STOP])
        assert not sequence.offer_drafts(sequence.position, [11])

    def test_a_drafter_attached_midway_sees_what_is_computed_from_there(self) -> None:
        sequence = new_sequence([1, 2, 3, 4, 5])
        step(sequence, [0])
        step(sequence, [10])
        step(sequence, [11])
        sequence.attach_drafter(3)
        step(sequence, [12])
        job = sequence.take_draft_job()
        assert job is not None
        assert (job.slot, job.context_start, job.token, job.start) == (3, 6, 12, 7)
        assert [positions(piece) for piece in job.context] == [range(6, 7)]

    def test_a_drafter_attached_between_chunks_sees_the_rest_of_the_prompt(self) -> None:
        sequence = new_sequence([1, 2, 3, 4, 5])
        step(sequence, [0])
        sequence.attach_drafter(3)
        step(sequence, [10])
        job = sequence.take_draft_job()
        assert job is not None and (job.context_start, job.start) == (4, 5)
        assert [positions(piece) for piece in job.context] == [range(4, 5)]

    def test_a_detached_sequence_goes_on_without_drafts_and_keeps_no_features(self) -> None:
        sequence = decoding()
        sequence.offer_drafts(5, [11, 12, 13])
        sequence.detach_drafter()
        assert sequence.next_block(K, CHUNK) == [10]
        step(sequence, [50])
        sequence.attach_drafter(2)
        job = sequence.take_draft_job()
        assert job is not None
        assert (job.slot, job.context, job.context_start, job.start) == (2, (), 6, 6)

    def test_another_drafter_does_not_get_the_features_of_the_first(self) -> None:
        sequence = decoding()
        step(sequence, [50])
        sequence.attach_drafter(2)
        job = sequence.take_draft_job()
        assert job is not None and job.context == () and job.context_start == 6


class TestVerifyPlan:
    def test_a_prompt_piece_fills_one_row_of_the_chunk(self) -> None:
        sequence = new_sequence([1, 2, 3, 4, 5, 6], slot=2)
        plan, blocks = plans.verify_plan([sequence], SHAPES, with_features=True)
        assert plan.prefill and blocks == [[1, 2, 3, 4]]
        step(sequence, [0])
        plan, blocks = plans.verify_plan([sequence], SHAPES, with_features=True)
        assert plan.tokens.tolist() == [[5, 6, 0, 0]]
        assert (plan.slots.tolist(), plan.starts.tolist(), plan.lengths.tolist()) == ([2], [4], [2])

    def test_a_decode_step_is_one_wide_without_and_full_width_with_any_draft(self) -> None:
        first, second = decoding(slot=1), decoding(slot=3)
        plan, _ = plans.verify_plan([first, second], SHAPES, with_features=True)
        assert plan.tokens.tolist() == [[10], [10]]
        second.offer_drafts(5, [11, 12, 13])
        plan, blocks = plans.verify_plan([first, second], SHAPES, with_features=True)
        assert plan.tokens.tolist() == [[10, 0, 0, 0], [10, 11, 12, 13]]
        assert plan.lengths.tolist() == [1, 4] and plan.slots.tolist() == [1, 3]
        assert blocks == [[10], [10, 11, 12, 13]]

    def test_prompts_and_decode_steps_do_not_share_a_plan(self) -> None:
        with pytest.raises(AssertionError):
            plans.verify_plan([new_sequence([1]), decoding()], SHAPES, with_features=True)

    def test_each_sequence_gets_its_own_tokens_and_features(self) -> None:
        sequences = [decoding(slot=slot) for slot in range(3)]
        sequences[0].offer_drafts(5, [11, 12, 13])
        sequences[2].offer_drafts(5, [21, 22, 23])
        _, blocks = plans.verify_plan(sequences, SHAPES, with_features=True)
        result = VerifyResult(
            [[11, 12, 60], [70], [21, 80]], features(100, 101, 102, 200, 300, 301), Span(0, 0)
        )
        outputs = plans.commit(sequences, blocks, result)
        assert [output.token_ids for output in outputs if output] == result.tokens
        jobs = [sequence.take_draft_job() for sequence in sequences]
        assert [values(job.context[0].features) for job in jobs if job] == [
            [100, 101, 102],
            [200],
            [300, 301],
        ]
        assert [(job.token, job.start) for job in jobs if job] == [(60, 8), (70, 6), (80, 7)]

    def test_a_prompt_piece_commits_all_its_features_though_it_gives_one_token(self) -> None:
        sequence = new_sequence([1, 2, 3, 4, 5])
        sequence.attach_drafter(0)
        _, blocks = plans.verify_plan([sequence], SHAPES, with_features=True)
        result = VerifyResult([[9]], features(0, 1, 2, 3), Span(0, 0))
        assert plans.commit([sequence], blocks, result) == [None]
        job = sequence.take_draft_job()
        assert job is not None and values(job.context[0].features) == [0, 1, 2, 3]

    def test_without_a_drafter_there_are_no_features_to_hand_out(self) -> None:
        sequence = new_sequence([1])
        plan, blocks = plans.verify_plan([sequence], SHAPES, with_features=False)
        assert not plan.with_features
        [output] = plans.commit([sequence], blocks, VerifyResult([[9]], None, Span(0, 0)))
        assert output is not None and output.token_ids == [9]

    def test_the_warm_up_plan_lives_in_the_scratch_slot(self) -> None:
        plan: VerifyPlan = plans.scratch_verify_plan(SHAPES, 2, K + 1)
        assert plan.tokens.shape == (2, K + 1)
        assert plan.slots.tolist() == [SHAPES.num_slots] * 2


class TestDraftPlans:
    def jobs(self) -> list[DraftJob]:
        """Three pieces of context in two slots, 9 rows; the second job does not ask."""
        return [
            DraftJob(
                2,
                (ContextPiece(0, features(0, 1, 2, 3)), ContextPiece(4, features(4))),
                token=10,
                start=5,
                context_start=0,
            ),
            DraftJob(
                0, (ContextPiece(8, features(8, 9, 10)),), token=None, start=20, context_start=8
            ),
            DraftJob(1, (ContextPiece(6, features(6)),), token=30, start=7, context_start=6),
        ]

    @pytest.mark.parametrize(
        ("max_rows", "sizes"),
        [(9, [9]), (100, [9]), (8, [1, 8]), (4, [1, 4, 4]), (3, [3, 3, 3]), (1, [1] * 9)],
    )
    def test_rows_are_split_by_the_limit_with_none_lost_or_reordered(
        self, max_rows: int, sizes: list[int]
    ) -> None:
        made = plans.draft_plans(self.jobs(), num_drafts=K, max_rows=max_rows)
        assert [len(plan.row_slots) for plan in made] == sizes
        assert max(sizes) <= max_rows
        rows = [
            row
            for plan in made
            for row in zip(
                plan.row_slots.tolist(),
                plan.row_positions.tolist(),
                values(plan.features),
                strict=True,
            )
        ]
        assert rows == [*((2, p, p) for p in range(5)), *((0, p, p) for p in (8, 9, 10)), (1, 6, 6)]

    @pytest.mark.parametrize("max_rows", [1, 4, 9])
    def test_drafts_are_asked_for_once_when_all_is_injected(self, max_rows: int) -> None:
        *before, last = plans.draft_plans(self.jobs(), num_drafts=K, max_rows=max_rows)
        assert all(len(plan.tokens) == 0 for plan in before)
        self.check_questions(last)

    def test_without_context_there_is_one_plan_that_only_drafts(self) -> None:
        [plan] = plans.draft_plans(
            [DraftJob(2, (), 10, 5, 0), DraftJob(1, (), 30, 7, 6)], num_drafts=K, max_rows=4
        )
        assert plan.features is None and len(plan.row_slots) == 0
        self.check_questions(plan)

    def check_questions(self, plan: DraftPlan) -> None:
        assert plan.tokens.tolist() == [10, 30]
        assert plan.slots.tolist() == [2, 1]
        assert plan.starts.tolist() == [5, 7]
        assert plan.context_starts.tolist() == [0, 6]
        assert plan.num_drafts == K

    def test_a_single_piece_is_passed_on_without_a_copy(self) -> None:
        piece = ContextPiece(0, features(0, 1))
        [plan] = plans.draft_plans([DraftJob(0, (piece,), 5, 2, 0)], num_drafts=K, max_rows=4)
        assert plan.features is not None
        assert np.shares_memory(plan.features.data, piece.features.data)
