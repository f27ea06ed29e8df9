"""z-lab's own implementation, on the same checkpoints, drafts and generates the same.

`dflash` on PyPI is the reference of DFlash's authors. It is a dependency of the tests only, and
`make test` installs it, so its absence is a failure here and not a reason to skip.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.messages import DraftPlan, DraftResult
from dflash_core.request import GenerationRequest
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from tests.tiny import write_drafter, write_target

# Not the last layer: transformers gives its output after the final norm only, which is where z-lab
# takes it, while this project (like vLLM and SGLang) takes it before.
TAPS = (0, 2, 4)
BLOCK_SIZE = 6
MAX_TOKENS = 40
SHAPES = StaticShapes.create(
    num_slots=1, max_model_len=128, num_drafts=BLOCK_SIZE - 1, prefill_chunk=16
)
SLIDING = ["sliding_attention", "full_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "full attention": {},
    "no list of tapped layers": {"dflash_config": {"mask_token_id": 16}},
    "a rope base of its own": {"rope_theta": 500.0},
    "sliding, causal in the block": {
        "layer_types": SLIDING,
        "sliding_window": 7,
        "use_sliding_window": True,
    },
    "sliding, not causal": {
        "layer_types": SLIDING,
        "sliding_window": 4,
        "use_sliding_window": True,
        "is_causal": False,
    },
    "causal everywhere": {"is_causal": True},
}
PROMPT_LENGTHS = (1, 5, 16, 37)  # within a prefill chunk of 16, just filling it, and over two more


@dataclass(frozen=True)
class Run:
    """One greedy generation: the blocks of drafts in the order of their making, and the output."""

    drafts: list[list[int]]
    output: list[int]


class Reference:
    """z-lab's draft model and transformers' Llama."""

    def __init__(self, target: Path, drafter: Path) -> None:
        self.target = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.drafter = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()

    def generate(self, prompt: list[int]) -> Run:
        drafts: list[list[int]] = []
        compute_logits = DFlashDraftModel.compute_logits

        def recording(hidden: torch.Tensor, head: torch.nn.Module) -> torch.Tensor:
            logits = compute_logits(self.drafter, hidden, head)
            drafts.append(logits[0].argmax(-1).tolist())
            return logits

        self.drafter.compute_logits = recording
        output = dflash_generate(
            self.drafter, self.target, torch.tensor([prompt]), MAX_TOKENS, stop_token_ids=None
        )
        return Run(drafts, output[0, len(prompt) :].tolist())


class Ours:
    """This project's runners, driven by its in-process engine."""

    def __init__(self, target: Path, drafter: Path) -> None:
        self.drafter = DrafterRunner.load(drafter, target, SHAPES, dtype=torch.float32)
        self.target = TargetRunner.load(
            target,
            SHAPES,
            tapped_layers=self.drafter.config.target_layer_ids,
            dtype=torch.float32,
        )

    def generate(self, prompt: list[int], tokenizer: Any) -> Run:
        def stopping(ids: list[int]) -> Stopping:
            request = GenerationRequest("test", ids, MAX_TOKENS)
            return Stopping(tokenizer, request, eos_token_ids=(), max_model_len=128)

        recorder = Recorder(self.drafter)
        [generation] = generate(self.target, recorder, [prompt], stopping)
        return Run(recorder.drafts, generation.token_ids)


class Recorder:
    """A drafter that remembers what it proposed."""

    def __init__(self, drafter: DrafterRunner) -> None:
        self.drafter = drafter
        self.shapes = drafter.shapes
        self.drafts: list[list[int]] = []

    def draft(self, plan: DraftPlan) -> DraftResult:
        result = self.drafter.draft(plan)
        self.drafts += result.tokens
        return result


def favour_few_tokens(weights: Path) -> None:
    """Make four tokens far likelier than the rest, so that random drafts are often accepted."""
    tensors = load_file(weights)
    tensors["lm_head.weight"][200:204] *= 4
    save_file(tensors, weights)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(256, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_and_output_equal_the_authors_own_step_by_step(
    variant: str, tmp_path: Path, tokenizer: Any
) -> None:
    """Near `max_tokens` z-lab drafts in shorter blocks, in which full attention sees less: of
    these blocks only the number is compared. When a single token is missing, z-lab still drafts
    it; this project leaves it to the target.
    """
    target = write_target(tmp_path / "target")
    favour_few_tokens(target / "model.safetensors")
    drafter = write_drafter(
        tmp_path / "drafter",
        target,
        block_size=BLOCK_SIZE,
        target_layer_ids=TAPS,
        **VARIANTS[variant],
    )
    reference, ours = Reference(target, drafter), Ours(target, drafter)
    compared, accepted = set(), 0
    for prompt in prompts():
        expected, run = reference.generate(prompt), ours.generate(prompt, tokenizer)
        assert run.output == expected.output
        full = [block for block in expected.drafts if len(block) == BLOCK_SIZE - 1]
        assert run.drafts[: len(full)] == full
        assert len(run.drafts) == sum(len(block) > 1 for block in expected.drafts)
        compared.update(map(tuple, full))
        accepted += MAX_TOKENS - 2 - len(run.drafts)  # at least: the last step may have none
    assert len(compared) > 20, "drafts must depend on the context for this test to mean anything"
    assert accepted > 10, "blocks of several tokens must occur for this test to mean anything"
