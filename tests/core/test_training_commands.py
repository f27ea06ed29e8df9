"""The three training commands, one after the other, on a tiny target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dflash_core.training import commands
from tests.tiny import write_target


@pytest.fixture
def config(tmp_path: Path, packaged_target: Path) -> Path:
    """A project with twelve questions for a random target with SmolLM2's tokenizer."""
    target = write_target(
        tmp_path / "target", tokenizer_from=packaged_target, vocab_size=49152, hidden_size=32
    )
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"What is {number} times seven?" for number in range(12)))
    settings = {
        "target": str(target),
        "folder": str(tmp_path / "project"),
        "prompts": str(prompts),
        "conversations": 8,
        "held_out": 4,
        "threads": 1,
        "generation": {"rows": 4, "max_question": 16, "max_answer": 12, "sampled": 0.25},
        "drafter": {"layers": 1, "block_size": 4, "mask_token_id": 16},
        "optimization": {"steps": 6, "batch_size": 2, "anchors": 4, "save_every": 4},
    }
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def run(*arguments: object) -> int | None:
    """Exit status of the command line in this process."""
    try:
        commands.main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code
    return 0


def test_data_train_and_evaluate_in_turn(config, capsys):
    folder = config.parent / "project"
    assert run("data", config) == 0
    assert len((folder / "train.jsonl").read_text().splitlines()) == 8
    assert len((folder / "held_out.jsonl").read_text().splitlines()) == 4

    assert run("train", config) == 0
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [report["step"] for report in log] == list(range(6))
    assert run("train", config) == 0, "a finished run has nothing more to do"
    assert len((folder / "log.jsonl").read_text().splitlines()) == 6
    card = (folder / "drafter" / "README.md").read_text()
    assert "| steps | 6 of 6 |" in card
    assert "8 conversations" in card

    assert run("evaluate", config, "--max-tokens", 8, "--prompts", 3) == 0
    results = json.loads((folder / "evaluation.json").read_text())
    assert [result["prompts"] for result in results] == [3] + [1] * 10 + [10]
    assert all(result["acceptance_length"] >= 1 for result in results)
    assert (folder / "evaluation.png").read_bytes().startswith(b"\x89PNG")
    assert run("evaluate", config, "--max-tokens", 8, "--prompts", 3, "--temperature", 1) == 0
    sampled = json.loads((folder / "evaluation.json").read_text())
    assert [result["temperature"] for result in results + sampled] == [0.0] * 12 + [1.0] * 12


def test_packed_conversations_are_what_another_project_begins_with(config, capsys):
    folder = config.parent / "project"
    assert run("data", config) == 0
    assert run("pack", config, config.parent / "corpus") == 0
    settings = yaml.safe_load(config.read_text())
    settings |= {"corpus": str(config.parent / "corpus"), "folder": str(config.parent / "second")}
    config.write_text(yaml.safe_dump(settings | {"conversations": 7}))
    assert run("data", config) == 0
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (config.parent / "second" / name).read_bytes() == (folder / name).read_bytes()
    (config.parent / "second" / "held_out.jsonl").write_text("")
    assert run("data", config) == 0, "a project's own sets are left as they are"
    assert len((config.parent / "second" / "train.jsonl").read_text().splitlines()) == 8

    packed = config.parent / "corpus" / "train.jsonl.xz"
    packed.write_bytes(packed.read_bytes()[:-20])
    (config.parent / "second" / "train.jsonl").unlink()
    assert run("data", config) == 1
    assert "train.jsonl.xz cannot be read" in " ".join(capsys.readouterr().out.split())


def test_commands_out_of_order_say_what_to_run_first(config, capsys):
    assert run("train", config) == 1
    assert "run the `data` command first" in capsys.readouterr().out


def test_a_target_without_chat_template_is_one_line(config, capsys):
    (config.parent / "target" / "chat_template.jinja").unlink()
    assert run("data", config) == 1
    out = capsys.readouterr().out
    assert "no chat template" in out
    assert "Traceback" not in out


def test_more_data_is_added_to_what_is_there(config):
    folder = config.parent / "project"
    assert run("data", config) == 0
    before = (folder / "train.jsonl").read_text()
    config.write_text(config.read_text().replace("conversations: 8", "conversations: 7"))
    assert run("data", config) == 0
    assert (folder / "train.jsonl").read_text() == before


def test_a_target_that_never_ends_its_questions_is_an_error_not_an_endless_loop(config, capsys):
    settings = yaml.safe_load(config.read_text())
    settings["prompts"] = None
    settings["generation"]["max_question"] = 2
    config.write_text(yaml.safe_dump(settings))
    assert run("data", config) == 1
    assert "hardly a chat model" in capsys.readouterr().out
