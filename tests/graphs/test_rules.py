"""A graph that breaks a rule is found, whatever the rule; a good one passes them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn import functional as F

from dflash_core.graphs.capture import CapturedGraph, CaptureError, capture, simulated_group
from dflash_core.graphs.rules import check, check_ranks
from dflash_core.parallel import TensorParallel, VocabParallelEmbedding, parallel_argmax

B, L, H, ROWS = 2, 4, 16, 32


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Cached(nn.Module):
    """A step with a cache, which `write` updates; by default as it should be."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.register_buffer("cache", meta(B, ROWS, H))
        self.write = write or (
            lambda cache, rows, new: cache.flatten(0, 1).index_copy_(0, rows, new)
        )

    def forward(self, x_RH: Tensor, rows_R: Tensor) -> Any:
        kept = self.write(self.cache, rows_R.long(), x_RH)
        answer = x_RH @ self.cache.flatten(0, 1).T
        return answer if kept is None else (answer, kept)


ROWS_INPUT = (meta(L, H), meta(L, dtype=torch.int32))


def broken(step: Callable[..., Any], *args: Any) -> list[str]:
    return [f"{each.rule}: {each.message}" for each in check(capture("step", step, *args))]


def test_a_good_graph_passes() -> None:
    def write(cache: Tensor, rows: Tensor, new: Tensor) -> None:
        cache.flatten(0, 1).index_copy_(0, rows, new)
        cache.flatten(0, 1).index_copy_(0, rows + 1, new)  # a second one in a row is fine

    assert broken(Cached(write), *ROWS_INPUT) == []


class TestStaticShapes:
    def test_a_choice_of_rows_by_mask(self) -> None:
        found = broken(lambda x: x[x[:, 0] > 0], meta(L, H))
        assert any(message.startswith("static shapes: ") for message in found)

    def test_a_branch_on_a_value(self) -> None:
        def step(x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x

        with pytest.raises(CaptureError, match="step: .*[Dd]ata.dependent"):
            capture("step", step, meta(L, H))

    def test_a_number_read_back(self) -> None:
        found = broken(lambda x, n: x[: n.item()], meta(L, H), meta(1, dtype=torch.int32))
        assert any(message.startswith("static shapes: ") for message in found)

    def test_a_break(self) -> None:
        def step(x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x + 1

        with pytest.raises(CaptureError):
            capture("step", step, meta(L, H))

    def test_a_dimension_that_is_a_symbol(self) -> None:
        """Fed past the capture, which would refuse it: as another compiler might make it."""
        graph = capture("step", lambda x: x + 1, meta(L, H))
        shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
        mode = torch._subclasses.FakeTensorMode(shape_env=shape_env)
        symbolic = mode.from_tensor(
            torch.empty(L, H),
            symbolic_context=torch.fx.experimental.symbolic_shapes.StatelessSymbolicContext(
                dynamic_sizes=[torch.fx.experimental.symbolic_shapes.DimDynamic.DYNAMIC] * 2
            ),
        )
        graph.placeholders[0].meta["val"] = symbolic
        assert any("static shapes: " in each for each in messages(graph))


def messages(graph: CapturedGraph) -> list[str]:
    return [f"{each.rule}: {each.message}" for each in check(graph)]


class TestTypes:
    def test_an_int64_input(self) -> None:
        [message] = broken(
            lambda x, i: x.index_select(0, i), meta(L, H), meta(2, dtype=torch.int64)
        )
        assert message.startswith("32 bits: input ") and "torch.int64" in message

    def test_an_int64_output(self) -> None:
        [message] = broken(lambda x: x.argmax(-1), meta(L, H))
        assert message.startswith("32 bits: output argmax is torch.int64")

    def test_float64_inside(self) -> None:
        found = broken(lambda x: (x.double() * 2).float(), meta(L, H))
        assert any("computes in float64" in message for message in found)


class TestOperators:
    def test_one_that_nobody_looked_at(self) -> None:
        [message] = broken(lambda x: torch.linalg.vector_norm(x, dim=-1), meta(L, H))
        assert message.startswith("operators: aten.linalg_vector_norm is not among")

    def test_sorting(self) -> None:
        found = broken(lambda x: x.sort(dim=-1).values, meta(L, H))
        assert any(message.startswith("operators: aten.sort") for message in found)


class TestCollectives:
    def test_the_four_are_legal(self) -> None:
        def step(x: Tensor) -> Tensor:
            group = dist.group.WORLD
            x = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))
            x = funcol.wait_tensor(funcol.all_gather_tensor(x, 0, group))
            return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 0, group))

        with simulated_group(0, 8):
            assert broken(step, meta(8, H)) == []

    def test_a_broadcast(self) -> None:
        def step(x: Tensor) -> Tensor:
            return funcol.wait_tensor(funcol.broadcast(x, 0, dist.group.WORLD))

        with simulated_group(0, 8):
            [message] = broken(step, meta(L, H))
        assert message.startswith("collectives: _c10d_functional.broadcast; only _c10d_functional.")


class TestWrites:
    def test_a_write_to_a_copy(self) -> None:
        """Functional, and returned: the caller would have to copy the whole cache back."""
        [message] = broken(
            Cached(lambda cache, rows, new: cache.flatten(0, 1).index_copy(0, rows, new)),
            *ROWS_INPUT,
        )
        assert message.startswith("aliased writes: index_copy writes to a copy of")
        assert message.endswith("which is not written back")

    def test_a_cache_that_is_computed_anew(self) -> None:
        def write(cache: Tensor, rows: Tensor, new: Tensor) -> None:
            cache.mul_(0.5)

        found = broken(Cached(write), *ROWS_INPUT)
        assert any("is overwritten by mul, not by a scatter into it" in each for each in found)

    def test_a_scatter_into_something_else(self) -> None:
        def write(cache: Tensor, rows: Tensor, new: Tensor) -> None:
            cache.mul_(0.5)
            cache.flatten(0, 1).index_copy_(0, rows, new)

        [message] = broken(Cached(write), *ROWS_INPUT)
        assert "is overwritten by a scatter into mul" in message


class TestConstants:
    @pytest.mark.parametrize("value", [float("-inf"), float("inf")])
    def test_an_infinite_mask(self, value: float) -> None:
        found = broken(
            lambda x, m: F.softmax(torch.where(m, x, value), dim=-1),
            meta(L, H),
            meta(L, H, dtype=torch.bool),
        )
        assert any(message.startswith("finite constants: ") for message in found)

    def test_a_large_negative_one_is_fine(self) -> None:
        lowest = torch.finfo(torch.bfloat16).min / 2
        mask = meta(L, H, dtype=torch.bool)
        assert broken(lambda x, m: torch.where(m, x, lowest), meta(L, H), mask) == []


@pytest.mark.parametrize(
    "step",
    [
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: x + torch.rand_like(x),
        lambda x: torch.multinomial(x.float().abs(), 1).int(),
    ],
)
def test_random_numbers(step: Callable[[Tensor], Tensor]) -> None:
    found = broken(step, meta(L, H))
    assert any(message.startswith("no randomness: ") for message in found)


def test_a_tensor_made_on_the_host() -> None:
    found = broken(lambda x: x + torch.arange(H).to(x.device), meta(L, H))
    assert any(
        message.startswith("one device: aten.arange makes a tensor on cpu") for message in found
    )


class Ranked(nn.Module):
    """An embedding split over ranks: as it is, and with the rank's number in the code."""

    def __init__(self, tp: TensorParallel, constant: bool) -> None:
        super().__init__()
        with torch.device("meta"):
            self.embedding = VocabParallelEmbedding(64, H, tp=tp)
        self.embedding.to("meta")
        self.tp, self.constant = tp, constant

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLH = self.embedding(tokens_BL)
        if self.constant:
            x_BLH = x_BLH * self.tp.rank
        return parallel_argmax(x_BLH, self.tp)


@pytest.mark.parametrize("constant", [False, True])
def test_ranks_that_compile_different_graphs(constant: bool) -> None:
    graphs = []
    for rank in (0, 7):
        with simulated_group(rank, 8) as tp:
            step = Ranked(tp, constant)
            graphs.append(capture("step", step, meta(B, L, dtype=torch.int32)))
    found = [each.message for each in check_ranks(*graphs)]
    if constant:
        assert len(found) == 1 and "on the first rank is" in found[0] and "7" in found[0]
    else:
        assert found == []


def test_a_group_inside_a_group_is_refused() -> None:
    with simulated_group(0, 2), pytest.raises(RuntimeError, match="in a process group already"):
        with simulated_group(0, 2):
            pass
