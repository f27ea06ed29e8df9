"""The CPU kernels compute what PyTorch does; rows do not depend on the rows beside them."""

from __future__ import annotations

import gc
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from dflash_core.attention import Block, attention_inputs, grouped_attention
from dflash_core.checkpoint import Checkpoint, load_target_config
from dflash_core.config import RopeConfig
from dflash_core.cpu import kernels, library
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.loading import build
from dflash_core.rope import RotaryEmbedding, rotate
from dflash_core.target import LlamaTarget
from dflash_core.target_runner import TargetRunner
from tests.core.test_drafter import TAPS, Pair, features_of, plan
from tests.core.test_drafter import VARIANTS as DRAFTERS
from tests.core.test_target import SHAPES, VARIANTS, run, transformers_model
from tests.tiny import write_drafter

CPU, BF16 = torch.device("cpu"), torch.bfloat16
needs_kernels = pytest.mark.skipif(
    not kernels.usable(BF16, CPU), reason="the kernels need AVX2 and a C compiler"
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(result: torch.Tensor, exact: torch.Tensor, scale: float = 1.0) -> None:
    """`result` is `exact` rounded to bfloat16, give or take the order of the sum."""
    size = exact.abs().max().item()
    torch.testing.assert_close(result.double(), exact, rtol=2**-7, atol=scale * 2e-3 * size)


@needs_kernels
class TestProducts:
    @pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 30, 100])
    @pytest.mark.parametrize("outputs, inputs", [(96, 64), (30, 32), (131, 62), (64, 576)])
    def test_a_product_after_a_norm(self, rows: int, outputs: int, inputs: int) -> None:
        weight, bias, gain = random(outputs, inputs), random(outputs), random(inputs)
        x = random(rows, inputs, seed=1)
        packed = kernels.Weight(weight, bias)
        normed = F.rms_norm(x.double(), (inputs,), gain.double(), 1e-5).bfloat16().double()
        expected = normed @ weight.double().T + bias.double()
        assert_rounded(kernels.linear(x, packed, (gain, 1e-5)), expected)
        plain = x.double() @ weight.double().T
        assert_rounded(kernels.linear(x, kernels.Weight(weight, None)), plain)

    @pytest.mark.parametrize("width", [16, 48, 50, 7])
    def test_swiglu(self, width: int) -> None:
        weight, bias, x = random(2 * width, 64), random(2 * width), random(5, 64, seed=1)
        gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, dim=-1)
        result = kernels.linear(x, kernels.Weight(weight, bias, swiglu=True))
        assert_rounded(result, F.silu(gate) * up)

    def test_silu_at_its_ends(self) -> None:
        """exp overflows and underflows here; the result does not."""
        gates = torch.tensor([-300.0, -90.0, -20.0, -1.0, 0.0, 1.0, 20.0, 90.0, 300.0]).bfloat16()
        weight = torch.zeros(18, 2).bfloat16()
        weight[:9, 0], weight[9:, 1] = gates, 1.0
        result = kernels.linear(
            torch.ones(1, 2).bfloat16(), kernels.Weight(weight, None, swiglu=True)
        )
        torch.testing.assert_close(result[0], F.silu(gates.double()).bfloat16())

    def test_a_row_has_the_same_bits_in_every_product(self) -> None:
        weight, x = kernels.Weight(random(200, 576), None), random(300, 576, seed=1)
        whole = kernels.linear(x, weight)
        for first, rows in ((0, 1), (5, 2), (100, 13), (17, 24), (299, 1)):
            some = slice(first, first + rows)
            assert torch.equal(kernels.linear(x[some], weight), whole[some])

    def test_the_rows_of_a_weight_are_those_it_was_made_of(self) -> None:
        weight = random(131, 62)
        numbers = torch.tensor([[0, 31, 32], [130, 5, 0]], dtype=torch.int32)
        assert torch.equal(kernels.Weight(weight, None).rows(numbers), weight[numbers.long()])

    def test_an_odd_number_of_inputs_is_refused(self) -> None:
        with pytest.raises(ValueError, match="4 x 3: the kernels need an even number"):
            kernels.Weight(random(4, 3), None)

    def test_argmax_is_the_first_of_equals(self) -> None:
        x = random(5, 1003)
        x[1, 700], x[1, 33], x[2, 1002], x[3] = 9.0, 9.0, 9.0, -7.0
        best = x.float().max(dim=-1, keepdim=True).values
        first = (x.float() == best).int().argmax(dim=-1)
        assert kernels.argmax(x).tolist() == first.tolist()
        assert [kernels.argmax(x)[row].item() for row in (1, 2, 3)] == [33, 1002, 0]


class Layer:
    """One decoder layer of random weights, packed, and what its attention should give."""

    def __init__(self, N: int, G: int, D: int, *, norms: bool) -> None:
        self.N, self.G, self.D, self.H = N, G, D, 64
        self.norms = (random(D, seed=2), random(D, seed=3)) if norms else None
        # Scores of some units: with larger ones a rounded query changes the key that wins.
        self.qkv = random((N + 2 * G) * D, self.H, seed=4) / 8
        self.output = random(self.H, N * D, seed=5)
        self.gain = random(self.H, seed=6)
        # An MLP that adds nothing: what is left is x + attention.
        zeros = torch.zeros(2 * 16, self.H).bfloat16(), torch.zeros(self.H, 16).bfloat16()
        self.packed = kernels.Layer(
            attention_norm=self.gain,
            mlp_norm=self.gain,
            eps=1e-5,
            qkv=kernels.Weight(self.qkv, None),
            output=kernels.Weight(self.output, None),
            gate_up=kernels.Weight(zeros[0], None, swiglu=True),
            down=kernels.Weight(zeros[1], None),
            heads=kernels.Heads(N, G, D, self.norms, 1e-6),
        )
        self.rotary = RotaryEmbedding(RopeConfig(theta=1e4, scaling=None), D, 800)

    def projected(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rotated queries and keys, and values, float64 `[..., heads, D]`."""
        normed = F.rms_norm(x.double(), (self.H,), self.gain.double(), 1e-5).bfloat16()
        heads = (normed.double() @ self.qkv.double().T).bfloat16().double()
        q, k, v = heads.unflatten(-1, (-1, self.D)).split((self.N, self.G, self.G), dim=-2)
        if self.norms is not None:
            q = F.rms_norm(q, (self.D,), self.norms[0].double(), 1e-6)
            k = F.rms_norm(k, (self.D,), self.norms[1].double(), 1e-6)
        rotary = self.rotary(positions, torch.float64)
        return rotate(q, rotary).bfloat16().double(), rotate(k, rotary).bfloat16().double(), v


@needs_kernels
class TestAttention:
    @pytest.mark.parametrize("norms", [False, True])
    @pytest.mark.parametrize(
        "N, G, D", [(9, 3, 64), (4, 2, 32), (4, 1, 8), (8, 2, 128), (4, 4, 80)]
    )
    @pytest.mark.parametrize("B, L", [(1, 1), (1, 8), (2, 5), (1, 200), (3, 64)])
    def test_a_layer(self, N: int, G: int, D: int, B: int, L: int, norms: bool) -> None:
        """With norms as a drafter's: a window, and the whole block is seen."""
        layer, positions = Layer(N, G, D, norms=norms), 700
        keys, values = random(5, positions, G, D, seed=7), random(5, positions, G, D, seed=8)
        slots = torch.tensor([3, 0, 4][:B], dtype=torch.int32)
        starts = torch.tensor([300, 17, 450][:B], dtype=torch.int32)[:, None]
        at = starts + torch.arange(L, dtype=torch.int32)
        places = slots.long()[:, None] * positions + at.long()
        first, end = None, at + 1
        if norms:
            first, end = (at - 100).clamp(min=0), (starts + L).expand(B, L)
        x = random(B, L, layer.H, seed=9)

        q, k, v = layer.projected(x, at)
        for cache, new in ((keys, k), (values, v)):
            cache.view(-1, G, D)[places.flatten()] = new.flatten(0, 1).bfloat16()
        expected = (keys.clone(), values.clone())
        block = Block(at, places, slots, first, end, positions)
        mask = attention_inputs(block, layer.rotary, torch.float32, N // G).mask.double()
        seen = [cache[slots].double() for cache in expected]
        attended = grouped_attention(q, *seen, mask).bfloat16().double()
        keys.view(-1, G, D)[places.flatten()] = 99.0
        values.view(-1, G, D)[places.flatten()] = 99.0

        result = x.clone()
        decoder = kernels.Decoder([layer.packed], tapped=(0,))
        rows = kernels.Rows(layer.rotary, *block[:-1])
        features = decoder.run(result, [rows], kernels.Caches([(keys, values)]))
        assert_rounded(result, x.double() + attended @ layer.output.double().T, scale=3)
        assert torch.equal(features, result)
        for cache, wanted in zip((keys, values), expected, strict=True):
            assert_rounded(cache, wanted.double())

    def test_heads_that_are_too_wide_are_refused(self) -> None:
        with pytest.raises(ValueError, match="head_dim 264"):
            kernels.Heads(2, 1, 264, None, 0.0)


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_target_gives_the_logits_of_its_checkpoint(variant: str, tmp_path: Path) -> None:
    transformers_model(tmp_path, **VARIANTS[variant])
    config = load_target_config(tmp_path)
    plain = build(
        lambda: LlamaTarget(config, max_model_len=64, tapped_layers=(1, 3)),
        Checkpoint(tmp_path),
        dtype=torch.float32,
        device=CPU,
        prefix="model.",
    )
    packed = TargetRunner.load(tmp_path, SHAPES, tapped_layers=(1, 3), dtype=BF16)
    assert packed.model.packed_layers is not None
    assert not list(packed.model.layers.parameters()), "weights are held twice"
    tokens = torch.randint(0, 131, (2, 9), generator=torch.Generator().manual_seed(1)).tolist()
    runner = TargetRunner(plain, SHAPES, dtype=torch.float32, device=CPU)
    expected, expected_features = run(runner, runner.cache, tokens, [2, 0], [0, 0])
    logits, features = run(packed, packed.cache, tokens, [2, 0], [0, 0])
    for result, wanted in ((logits, expected), (features, expected_features)):
        assert (result.float() - wanted).abs().mean() < 0.02 * wanted.std()


@needs_kernels
@pytest.mark.parametrize("variant", DRAFTERS)
def test_a_drafter_gives_the_logits_of_its_checkpoint(variant: str, tmp_path: Path) -> None:
    """Not its drafts: with random weights the two best are closer than bfloat16 can tell."""
    pair = Pair(tmp_path, **DRAFTERS[variant])
    folders = tmp_path / "drafter", tmp_path / "target"
    packed = DrafterRunner.load(*folders, SHAPES, dtype=BF16)
    assert packed.model.packed_injection is not None
    features = features_of(1)
    for first, end in ((0, 13), (13, 21)):
        rows = [(2, position) for position in range(first, end)]
        pair.runner.draft(plan(features[first:end], rows, []))
        packed.draft(plan(features[first:end].bfloat16(), rows, []))
    results = []
    for runner in (pair.runner, packed):
        block = torch.tensor([[5, *[pair.config.mask_token_id] * SHAPES.num_drafts]])
        one = torch.ones(1, dtype=torch.int32)
        with torch.inference_mode():
            x = runner.vocabulary.embed_tokens(block)
            hidden = runner.model(x, 2 * one, 21 * one, 0 * one, runner.cache, 64)
            results.append(runner.vocabulary.logits(hidden, runner.model.norm).float())
    assert (results[1] - results[0]).abs().mean() < 0.02 * results[0].std()


@needs_kernels
def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    """Neither the checkpoint's file nor a tied embedding is kept beside what was packed."""
    transformers_model(tmp_path, tie_word_embeddings=True)
    write_drafter(tmp_path / "drafter", tmp_path, target_layer_ids=TAPS)
    target = TargetRunner.load(tmp_path, SHAPES, dtype=BF16)
    drafter = DrafterRunner.load(tmp_path / "drafter", tmp_path, SHAPES, dtype=BF16)
    gc.collect()
    assert not list(target.model.embed_tokens.parameters())
    assert not list(drafter.vocabulary.parameters())
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()


class TestLibrary:
    @pytest.fixture(autouse=True)
    def fresh(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(library, "processor_instructions", lambda: library.INSTRUCTIONS[-1])
        library.kernels.cache_clear()
        yield
        library.kernels.cache_clear()

    def compiler(self, folder: Path, script: str) -> str:
        path = folder / "a-compiler"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return str(path)

    @needs_kernels
    def test_it_is_compiled_once(self, tmp_path: Path) -> None:
        assert library.kernels() is not None
        [file] = (tmp_path / "cache").iterdir()
        before = file.stat()
        library.kernels.cache_clear()
        assert library.kernels() is not None
        assert file.stat() == before

    @pytest.mark.parametrize(
        "script, message",
        [
            ("echo 'no such option: -mavx512bf16' >&2; exit 1", "no such option"),
            (None, "there is no"),
        ],
    )
    def test_without_a_compiler_the_log_says_so(
        self,
        script: str | None,
        message: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        path = "/nonexistent/cc" if script is None else self.compiler(tmp_path, script)
        monkeypatch.setenv("CC", path)
        with caplog.at_level(logging.WARNING):
            assert library.kernels() is None
        assert message in caplog.text and "install a C compiler" in caplog.text

    def test_on_another_processor_nothing_is_compiled_or_said(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(library, "processor_instructions", lambda: None)
        monkeypatch.setenv("CC", "/nonexistent/cc")
        assert library.kernels() is None
        assert not caplog.text


@needs_kernels
def test_kernels_and_pytorch_share_their_threads(tmp_path: Path) -> None:
    """Two OpenMP libraries in a process would fight over the cores."""
    script = (
        "import torch\n"
        "from dflash_core.cpu import library\n"
        "assert library.kernels() is not None\n"
        "maps = open('/proc/self/maps').read().splitlines()\n"
        "print(len({line.split()[-1] for line in maps if 'libgomp' in line or 'libomp' in line}))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=os.environ
    )
    assert result.stdout.strip() == "1"


def test_a_target_without_kernels_runs_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_model(tmp_path)
    tokens = torch.randint(0, 131, (1, 9), generator=torch.Generator().manual_seed(1)).tolist()
    reference = TargetRunner.load(tmp_path, SHAPES, tapped_layers=TAPS, dtype=torch.float32)
    expected, _ = run(reference, reference.cache, tokens, [0], [0])
    monkeypatch.setattr(kernels, "usable", lambda dtype, device: False)
    runner = TargetRunner.load(tmp_path, SHAPES, tapped_layers=TAPS, dtype=BF16)
    assert runner.model.packed_layers is None
    logits, _ = run(runner, runner.cache, tokens, [0], [0])
    assert (logits.float() - expected).abs().mean() < 0.03 * expected.std()
