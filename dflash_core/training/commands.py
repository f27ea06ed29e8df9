"""The command line: `python -m dflash_core.training data|pack|train|evaluate CONFIG`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from dflash_core.drafter import DFlashDrafter
from dflash_core.errors import CheckpointError
from dflash_core.sampling import SamplingParams
from dflash_core.training.allocator import keep_freed_memory
from dflash_core.training.batches import BatchSource
from dflash_core.training.conversations import Conversation, ConversationWriter, read_conversations
from dflash_core.training.corpus import pack, unpack
from dflash_core.training.errors import TrainingError
from dflash_core.training.evaluation import HAND_WRITTEN, Evaluator, as_table, plot, together
from dflash_core.training.facts import Facts
from dflash_core.training.features import FeatureFile, compute_features
from dflash_core.training.generation import Generator
from dflash_core.training.initial import new_drafter
from dflash_core.training.project import Project, replace_file
from dflash_core.training.prompts import ChatTemplate, read_prompts
from dflash_core.training.settings import load_settings
from dflash_core.training.trainer import Trainer, train
from dflash_core.training.workers import Workers

HELD_OUT_SAMPLED = 0.25  # share of sampled answers there: acceptance at temperature 1 needs some

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
ConfigFile = Annotated[Path, typer.Argument(help="YAML file with the settings of the project")]


@app.command()
def data(config: ConfigFile) -> None:
    """Let the target write conversations, until there are as many as the settings ask for."""
    project = _open(config)
    settings = project.settings
    template = ChatTemplate.of(project.tokenizer)
    for path in unpack(project):
        _console().print(f"{settings.corpus} -> {path}")
    room = settings.generation.max_question + settings.generation.max_answer
    model = project.target(longest=len(template.head) + len(template.bridge) + room, tapped=False)
    workers = Workers(settings.threads)
    held_out = _existing(project.path("held_out.jsonl"))
    present = _existing(project.path("train.jsonl"))
    seen = {conversation.prompt for conversation in (*held_out, *present)}
    questions = _questions(project, template, seen) if settings.prompts is not None else None
    missing = settings.held_out - len(held_out)
    if missing > 0:
        mixed = replace(settings.generation, sampled=HELD_OUT_SAMPLED)
        generator = Generator(
            model, template, mixed, questions=questions, seed=settings.seed + 1, workers=workers
        )
        with ConversationWriter(project.path("held_out.jsonl")) as writer, _bar() as bar:
            task = bar.add_task("held out", total=missing)
            for conversation in generator.run(missing):
                writer.append([conversation])
                seen.add(conversation.prompt)
                bar.advance(task)
    # A resumed run must not repeat the questions of the one before it.
    seed = settings.seed + 2 + len(present)
    generator = Generator(
        model, template, settings.generation, questions=questions, seed=seed, workers=workers
    )
    with ConversationWriter(project.path("train.jsonl")) as writer, _bar() as bar:
        count = len(present)
        task = bar.add_task("train", total=settings.conversations, completed=count)
        for conversation in generator.run() if count < settings.conversations else ():
            if conversation.prompt in seen:
                continue
            seen.add(conversation.prompt)
            writer.append([conversation])
            count += 1
            bar.advance(task)
            if count >= settings.conversations:
                break
    _console().print(f"{count} conversations -> {project.path('train.jsonl')}")


@app.command("pack")
def pack_command(
    config: ConfigFile, folder: Annotated[Path, typer.Argument(help="Where to write them")]
) -> None:
    """Compress the project's conversations, for another project's `corpus` to begin with."""
    for path in pack(_open(config), folder):
        _console().print(f"-> {path}")


@app.command("train")
def train_command(config: ConfigFile) -> None:
    """Compute what is missing of the features, then train; resumes where it was interrupted."""
    project = _open(config)
    settings = project.settings
    conversations = project.conversations("train")[: settings.conversations]
    held_out = project.conversations("held_out")
    longest = max(len(c.tokens) for c in (*conversations, *held_out))
    target = project.target(longest=longest)
    workers = Workers(settings.threads)
    for name, part in (("train", conversations), ("held_out", held_out)):
        with _bar() as bar:
            task = bar.add_task(f"features of {name}", total=len(part))
            for done in compute_features(target, part, project.features_path(name), workers):
                bar.update(task, completed=done)
    features = FeatureFile(project.features_path("train"), conversations, project.width)
    weights = project.initial_weights()
    if weights is None:
        sample = torch.empty((len(conversations[0].tokens), project.width), dtype=torch.bfloat16)
        features.read(0, sample)
        hidden_size = project.target_config.hidden_size
        initial = new_drafter(
            project.drafter_config, target, sample[:, :-hidden_size], seed=settings.seed
        )
        weights = dict(initial.named_parameters())
    del target
    counts = torch.zeros(project.target_config.vocab_size, dtype=torch.int64)
    for c in conversations:
        counts += torch.bincount(torch.tensor(c.tokens[c.answer :]), minlength=len(counts))
    run = settings.optimization
    trainer = Trainer(
        DFlashDrafter(
            project.drafter_config, max_model_len=longest + settings.drafter.block_size
        ).to(project.dtype),
        weights,
        project.vocabulary(),
        BatchSource(
            conversations,
            features,
            width=project.width,
            batch_size=run.batch_size,
            anchors=run.anchors,
            block_size=settings.drafter.block_size,
            short=run.short,
            seed=run.seed,
        ),
        counts,
        run,
        workers,
    )
    fingerprint = {
        "target": settings.target,
        "drafter": project.drafter_json,
        "optimization": vars(run),
        "conversations": len(conversations),
    }
    facts = Facts(project, int(counts.sum()), len(conversations))
    with _bar() as bar:
        task = bar.add_task("steps", total=run.steps)
        for report in train(
            trainer, project.path("checkpoint.pt"), project.path("log.jsonl"), fingerprint
        ):
            length = f"loss {report.loss:.3f}, {report.length:.2f} tokens per step"
            bar.update(task, completed=report.step + 1, description=length)
            if trainer.step % run.save_every == 0:
                facts.export(trainer)
    _console().print(f"drafter -> {facts.export(trainer, measure=True)}")


@app.command()
def evaluate(
    config: ConfigFile,
    drafter: Annotated[Path | None, typer.Option(help="Folder; default: the trained one")] = None,
    num_drafts: Annotated[
        int | None, typer.Option(min=1, help="K; default: block_size - 1")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of each answer")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to use")] = 64,
    slots: Annotated[int, typer.Option(min=1, help="Prompts at a time")] = 8,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 for greedy decoding")] = 0.0,
) -> None:
    """Measure acceptance in real decoding, on held-out and on hand-written prompts."""
    project = _open(config)
    template = ChatTemplate.of(project.tokenizer)
    trained = {c.prompt for c in _existing(project.path("train.jsonl"))}
    held_out = [c.prompt for c in project.conversations("held_out") if c.prompt not in trained]
    # Evenly from the whole set: it is in the order of completion, short answers first.
    number = min(prompts, len(held_out))
    chosen = [held_out[index * len(held_out) // number] for index in range(number)]
    sets = {"held out": [list(prompt) for prompt in chosen]}
    for name, text in HAND_WRITTEN.items():
        question = tuple(project.tokenizer.encode(text, add_special_tokens=False))
        sets[name] = [list(template.prompt(question))]
    evaluator = Evaluator(
        project.target_folder,
        drafter or project.path("drafter"),
        project.tokenizer,
        num_drafts=num_drafts or project.settings.drafter.block_size - 1,
        max_tokens=max_tokens,
        slots=slots,
        longest_prompt=max(len(prompt) for prompts in sets.values() for prompt in prompts),
        sampling=SamplingParams(temperature=temperature, seed=project.settings.seed),
    )
    evaluations = []
    for evaluation in evaluator.run(sets):
        evaluations.append(evaluation)
        _console().print(f"{evaluation.name}: {evaluation.statistics.acceptance_length:.3f}")
    evaluations.append(together("hand-written", evaluations[1:]))
    _console().print(as_table(evaluations))
    result = json.dumps([evaluation.as_dict() for evaluation in evaluations], indent=2) + "\n"
    replace_file(project.path("evaluation.json"), result.encode())
    plot([evaluations[0], evaluations[-1]], project.path("evaluation.png"))
    _console().print(f"-> {project.path('evaluation.json')}, {project.path('evaluation.png')}")


def _questions(
    project: Project, template: ChatTemplate, seen: set[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """Those of the prompts file that have no answer yet."""
    longest = project.settings.generation.max_question
    for text in read_prompts(Path(project.settings.prompts or "")):
        question = tuple(project.tokenizer.encode(text, add_special_tokens=False))
        if template.prompt(question) in seen:
            continue
        if len(question) > longest:
            _console().print(f"left out, longer than max_question = {longest}: {text[:60]}…")
            continue
        yield question


def _existing(path: Path) -> list[Conversation]:
    return list(read_conversations(path)) if path.exists() else []


def _bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=_console(),
    )


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False)


def _open(config: Path) -> Project:
    settings = load_settings(config)
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    return Project(settings)


def main(arguments: list[str] | None = None) -> None:
    """Run a command; what the user can put right is one line, not a traceback."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        app(arguments, standalone_mode=True)
    except (TrainingError, CheckpointError) as error:
        Console(soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
        raise SystemExit(1) from error
