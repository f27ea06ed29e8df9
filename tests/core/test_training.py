"""Training: what a block sees, that it learns, and that nothing is lost when it is interrupted."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from dflash_core.checkpoint import Checkpoint
from dflash_core.config import drafter_config
from dflash_core.drafter import DFlashDrafter
from dflash_core.kv_cache import KVCache
from dflash_core.loading import build
from dflash_core.random_drafter import write_random_drafter
from dflash_core.sampling import SamplingParams
from dflash_core.statistics import AcceptanceStatistics
from dflash_core.training.batches import BatchSource
from dflash_core.training.conversations import (
    Conversation,
    ConversationWriter,
    read_conversations,
)
from dflash_core.training.corpus import unpack
from dflash_core.training.errors import TrainingError
from dflash_core.training.evaluation import Evaluator
from dflash_core.training.features import FeatureFile, compute_features
from dflash_core.training.forward import draft_hidden
from dflash_core.training.generation import GenerationSettings, Generator
from dflash_core.training.initial import new_drafter
from dflash_core.training.loss import DistilledCrossEntropy, LossVocabulary
from dflash_core.training.project import Project
from dflash_core.training.prompts import ChatTemplate, read_prompts
from dflash_core.training.replay import replay
from dflash_core.training.settings import (
    DraftModelSettings,
    OptimizationSettings,
    TrainingSettings,
    load_settings,
)
from dflash_core.training.trainer import Trainer
from dflash_core.training.workers import Workers
from tests.tiny import MASK_TOKEN_ID, write_target

TAPS = (0, 2, 4)
RUN = OptimizationSettings(
    steps=300, batch_size=4, anchors=16, learning_rate=3e-3, warmup=20, frequent=256, sampled=0
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads would spend their time on waiting for each other at these sizes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class ByteTokenizer:
    """One token per byte: stands in for a tokenizer where no text matters."""

    chat_template = "given below"

    def apply_chat_template(self, messages: list, **options: object) -> str:
        return f"<{messages[0]['content']}>"

    def encode(self, text: str, **options: object) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **options: object) -> str:
        return bytes(ids).decode(errors="replace")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A tiny random target that has answered eight random prompts greedily."""
    folder = tmp_path_factory.mktemp("training")
    target = write_target(folder / "target")
    settings = TrainingSettings(
        target=str(target),
        folder=str(folder),
        drafter=DraftModelSettings(
            layers=2, block_size=6, target_layer_ids=TAPS, mask_token_id=MASK_TOKEN_ID
        ),
        optimization=RUN,
    )
    project = Project(settings, torch.float32)
    random = torch.Generator().manual_seed(1)
    questions = torch.randint(20, 250, (8, 5), generator=random).tolist()
    generator = Generator(
        project.target(longest=128, tapped=False),
        ChatTemplate.of(ByteTokenizer()),
        GenerationSettings(rows=3, max_question=5, max_answer=30, sampled=0.0),
        questions=iter(map(tuple, questions)),
        workers=Workers(2),
    )
    with ConversationWriter(project.path("train.jsonl")) as writer:
        writer.append(list(generator.run()))
    model = project.target(longest=128)
    conversations, path = project.conversations("train"), project.features_path("train")
    assert list(compute_features(model, conversations, path, Workers(2)))[-1] == 8
    return project


def trainer_of(project: Project, run: OptimizationSettings = RUN, threads: int = 1) -> Trainer:
    conversations = project.conversations("train")
    features = FeatureFile(project.features_path("train"), conversations, project.width)
    sample = torch.empty((len(conversations[0].tokens), project.width), dtype=torch.bfloat16)
    features.read(0, sample)
    hidden = project.target_config.hidden_size
    target = project.target(longest=128)
    weights = new_drafter(project.drafter_config, target, sample[:, :-hidden], seed=0)
    return Trainer(
        DFlashDrafter(project.drafter_config, max_model_len=128).float(),
        dict(weights.named_parameters()),
        project.vocabulary(),
        BatchSource(
            conversations,
            features,
            width=project.width,
            batch_size=run.batch_size,
            anchors=run.anchors,
            block_size=project.drafter_config.block_size,
            short=run.short,
            seed=run.seed,
        ),
        torch.ones(project.target_config.vocab_size, dtype=torch.int64),
        run,
        Workers(threads),
    )


def answers_of(project: Project) -> list[tuple[Conversation, torch.Tensor]]:
    conversations = project.conversations("train")
    features = FeatureFile(project.features_path("train"), conversations, project.width)
    answers = []
    for index, conversation in enumerate(conversations):
        rows = torch.empty((len(conversation.tokens), project.width), dtype=torch.bfloat16)
        features.read(index, rows)
        answers.append((conversation, rows[:, : -project.target_config.hidden_size].float()))
    return answers


# What a block sees


@pytest.mark.parametrize("layers", [1, 3])
def test_training_forward_equals_the_served_drafter_position_by_position(tmp_path, layers):
    target = write_target(tmp_path / "target")
    folder = write_random_drafter(
        target, tmp_path / "drafter", layers=layers, mask_token_id=16, target_layer_ids=TAPS
    )
    config = drafter_config(json.loads((folder / "config.json").read_text()))
    served = build(
        lambda: DFlashDrafter(config, max_model_len=64),
        Checkpoint(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    random = torch.Generator().manual_seed(2)
    B, S, A, L, H = 3, 40, 4, config.block_size, config.hidden_size
    features = torch.randn((B, S, len(TAPS) * H), generator=random)
    blocks = torch.randn((B, A, L, H), generator=random)
    anchors = torch.stack([torch.randperm(S - 1, generator=random)[:A] + 1 for _ in range(B)])

    with torch.inference_mode():
        trained = draft_hidden(served, features, blocks, anchors)
        cache = KVCache(
            num_layers=layers,
            num_slots=B,
            max_len=64,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        slots, positions = torch.arange(B)[:, None], torch.arange(S)[None]
        rows = cache.rows(slots, positions, torch.ones((B, S), dtype=torch.bool)).flatten()
        for a in range(A):
            # A block overwrites the positions that follow its anchor, so once for each.
            served.inject(features.flatten(0, 1), rows, positions.expand(B, S).flatten(), cache)
            hidden = served(
                blocks[:, a],
                torch.arange(B),
                anchors[:, a].int(),
                torch.zeros(B, dtype=torch.int32),
                cache,
                S,
            )
            torch.testing.assert_close(trained[:, a], hidden, rtol=1e-4, atol=1e-4)


def test_features_of_the_anchor_and_later_positions_change_nothing(project):
    model = DFlashDrafter(project.drafter_config, max_model_len=64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    H = project.drafter_config.hidden_size
    features = torch.randn(1, 20, len(TAPS) * H)
    blocks = torch.randn(1, 1, 6, H)
    anchor = torch.tensor([[7]])
    with torch.inference_mode():
        before = draft_hidden(model, features, blocks, anchor)
        later = features.clone()
        later[:, 7:] = 99.0
        assert torch.equal(draft_hidden(model, later, blocks, anchor), before)
        earlier = features.clone()
        earlier[:, 6] = 99.0
        assert not torch.equal(draft_hidden(model, earlier, blocks, anchor), before)


# The loss


@pytest.mark.parametrize(("share", "chain"), [(0.0, 0.0), (0.3, 0.0), (0.3, 0.8)])
def test_the_fused_loss_and_its_gradient_are_those_of_plain_cross_entropy(share, chain):
    random = torch.Generator().manual_seed(0)
    N, K = 140, 5
    hidden = torch.randn((N * K, 16), generator=random, requires_grad=True)
    teacher = torch.randn((N * K, 16), generator=random) if share else None
    head = torch.randn((50, 16), generator=random)
    labels = torch.randint(50, (N * K,), generator=random)
    # Half of the first drafts are made right, so that the weights behind them differ.
    labels[::10] = (hidden.detach() @ head.T).argmax(-1)[::10]
    weights = torch.rand((N, K), generator=random)
    weights[::7, 3:] = 0.0

    loss, correct = DistilledCrossEntropy.apply(
        hidden, teacher, head, labels, weights, share, chain
    )
    loss.backward()
    plain = hidden.detach().clone().requires_grad_()
    logits = plain @ head.T
    rows = (1 - share) * F.cross_entropy(logits, labels, reduction="none")
    if teacher is not None:
        soft = (teacher @ head.T).softmax(-1)
        rows = rows + share * F.cross_entropy(logits, soft, reduction="none")
    expected_weights = weights.clone()
    passed = logits.detach().softmax(-1).gather(1, labels[:, None]).view(N, K)
    right = (logits.argmax(-1) == labels).view(N, K)
    for n in range(N):
        before = 1.0
        for k in range(K):
            expected_weights[n, k] *= 1 - chain + chain * before
            before *= 1.0 if right[n, k] else passed[n, k].item()
    expected = (expected_weights.flatten() * rows).sum() / expected_weights.sum()
    expected.backward()

    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(hidden.grad, plain.grad)
    assert torch.equal(correct, logits.argmax(-1) == labels)
    assert 70 <= correct.sum() < N * K


def test_every_label_takes_part_in_the_loss_however_rare():
    counts = torch.arange(100)
    head = torch.randn(100, 4)
    vocabulary = LossVocabulary(head, counts, frequent=10, sampled=5)
    labels = torch.tensor([[3, 95], [0, 3]])
    ids, index, head_VH = vocabulary.choose(labels, torch.Generator().manual_seed(0))
    assert torch.equal(ids[index[labels]], labels)
    assert torch.equal(head_VH, head[ids])
    assert set(range(90, 100)) <= set(ids.tolist())
    assert len(ids) == len(set(ids.tolist())) <= 10 + 5 + 3


# Learning


def test_two_minutes_on_a_fixed_set_reach_nine_tenths_of_the_drafts(project, tokenizer):
    trainer = trainer_of(project)
    K = project.drafter_config.block_size - 1
    answers = answers_of(project)
    before = replay(trainer.model, trainer.vocabulary, answers)
    while trainer.step < RUN.steps:
        trainer.run_step()
    after = replay(trainer.model, trainer.vocabulary, answers)
    assert before.num_accepted_tokens < 0.5 * before.num_draft_tokens
    assert after.num_accepted_tokens > 0.9 * after.num_draft_tokens
    assert after.acceptance_length > 1 + 0.7 * K  # the last steps of an answer need fewer drafts

    drafter = project.export(trainer.optimizer.masters, {"steps": trainer.step})
    prompts = {"fixed set": [list(conversation.prompt) for conversation, _ in answers]}

    def decoded(temperature: float, seed: int = 0) -> AcceptanceStatistics:
        evaluator = Evaluator(
            project.target_folder,
            drafter,
            tokenizer,
            num_drafts=K,
            max_tokens=30,
            slots=4,
            longest_prompt=8,
            dtype=torch.float32,
            sampling=SamplingParams(temperature=temperature, seed=seed),
        )
        (evaluation,) = evaluator.run(prompts)
        assert evaluation.as_dict()["temperature"] == temperature
        return evaluation.statistics

    greedy = decoded(0.0)
    assert greedy.num_accepted_tokens > 0.9 * greedy.num_draft_tokens
    # A random target's samples are hardly ever its likeliest tokens.
    sampled = decoded(2.0)
    assert sampled.num_accepted_tokens < 0.5 * sampled.num_draft_tokens
    assert decoded(2.0) == sampled != decoded(2.0, seed=1)


def test_the_exported_card_and_config_describe_the_run(project):
    trainer = trainer_of(project)
    folder = project.export(trainer.optimizer.masters, {"steps": 0, "seed": 0})
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["DFlashDraftModel"]
    assert raw["dflash_config"] == {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": list(TAPS)}
    assert raw == project.drafter_json
    assert "| steps | 0 |" in (folder / "README.md").read_text()
    checkpoint = Checkpoint(folder)
    assert checkpoint.names() == set(trainer.optimizer.masters)
    assert all(checkpoint.read(name).dtype == torch.bfloat16 for name in checkpoint.names())


def test_the_result_is_an_average_over_the_last_steps(project):
    plain = trainer_of(project, replace(RUN, average=0.0))
    averaged = trainer_of(project, replace(RUN, average=0.8))
    for _ in range(20):
        plain.run_step()
        averaged.run_step()
        if averaged.step == 8:
            kept = {name: weight.clone() for name, weight in averaged.optimizer.masters.items()}
    for name, weight in plain.optimizer.result.items():
        assert torch.equal(weight, plain.optimizer.masters[name])
        assert torch.equal(averaged.optimizer.masters[name], plain.optimizer.masters[name])
    matrix = "layers.0.mlp.up_proj.weight"
    average, last = averaged.optimizer.result[matrix], averaged.optimizer.masters[matrix]
    behind = (average - kept[matrix]).norm() / (last - kept[matrix]).norm()
    assert 0.3 < behind < 0.98


def test_threads_share_a_step_and_change_nothing(project):
    alone, shared = trainer_of(project), trainer_of(project, threads=2)
    for _ in range(5):
        # Equally many anchors in both halves, so the mean of their means is the mean.
        first, second = alone.run_step(), shared.run_step()
        assert second.loss == pytest.approx(first.loss, rel=1e-3)
        assert second.gradient_norm == pytest.approx(first.gradient_norm, rel=1e-2)
    for name, weight in alone.optimizer.masters.items():
        torch.testing.assert_close(shared.optimizer.masters[name], weight, rtol=0.05, atol=5e-3)


@pytest.mark.parametrize(("size", "ends"), [(8, [2, 5, 8]), (2, [1, 2]), (1, [1])])
def test_work_is_split_into_equal_parts(size, ends):
    slices = Workers(3).split(size)
    assert [part.stop for part in slices] == ends
    assert [part.start for part in slices] == [0, *ends[:-1]]


def test_a_failure_in_a_thread_is_raised():
    def run(part: int) -> int:
        if part == 1:
            raise TrainingError("of part 1")
        return part

    assert Workers(2).map(abs, [-1, -2, -3]) == [1, 2, 3]
    with pytest.raises(TrainingError, match="of part 1"):
        Workers(2).map(run, range(3))


# Interruptions

CHILD = """
import sys
import torch
from pathlib import Path
from tests.core.test_training import RUN, trainer_of
from dflash_core.training.project import Project
from dflash_core.training.settings import *
from dflash_core.training.trainer import train
from dataclasses import replace

torch.set_num_threads(1)
target, folder, out = sys.argv[1:]
settings = TrainingSettings(target=target, folder=folder, drafter=DraftModelSettings(
    layers=2, block_size=6, target_layer_ids=(0, 2, 4), mask_token_id=16), optimization=RUN)
trainer = trainer_of(Project(settings, torch.float32), replace(RUN, steps=40, save_every=5))
out = Path(out)
for report in train(trainer, out / "checkpoint.pt", out / "log.jsonl", {"steps": 40}):
    print(report.step, flush=True)
"""


def test_a_killed_run_resumes_with_the_same_data_and_ends_the_same(project, tmp_path):
    command = [
        sys.executable, "-c", CHILD, project.settings.target, str(project.folder)
    ]  # fmt: skip

    def losses(out: Path) -> dict[int, float]:
        lines = (out / "log.jsonl").read_text().splitlines()
        return {report["step"]: report["loss"] for report in map(json.loads, lines)}

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    subprocess.run([*command, str(whole)], check=True, stdout=subprocess.DEVNULL)
    child = subprocess.Popen([*command, str(killed)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for line in child.stdout:
        if int(line) >= 17:
            child.send_signal(signal.SIGKILL)
            break
    child.stdout.close()
    assert child.wait() == -signal.SIGKILL
    subprocess.run([*command, str(killed)], check=True, stdout=subprocess.DEVNULL)

    steps = [json.loads(line)["step"] for line in (killed / "log.jsonl").read_text().splitlines()]
    assert steps.count(15) >= 1 and steps.count(39) == 1 and steps.count(0) == 1
    assert losses(killed) == pytest.approx(losses(whole), rel=1e-4)


def test_a_checkpoint_of_other_settings_is_refused_by_the_name_of_the_setting(project, tmp_path):
    trainer = trainer_of(project)
    trainer.save(tmp_path / "checkpoint.pt", {"optimization": 1, "conversations": 8})
    with pytest.raises(TrainingError, match=r"other settings \(conversations\)"):
        trainer.resume(tmp_path / "checkpoint.pt", {"optimization": 1, "conversations": 9})


def test_batches_depend_on_seed_and_step_alone(project):
    first, second = trainer_of(project).batches, trainer_of(project).batches
    second.batch(7)  # another past
    for step in (0, 1, 5):
        a, b = first.batch(step), second.batch(step)
        assert torch.equal(a.anchors_BA, b.anchors_BA)
        assert torch.equal(a.features_BSW, b.features_BSW)
    epochs = [first.batch(step) for step in range(2 * first.batches_per_epoch)]
    assert not torch.equal(epochs[0].anchors_BA, epochs[first.batches_per_epoch].anchors_BA)


def test_some_steps_have_shorter_blocks(project):
    trainer = trainer_of(project, replace(RUN, short=0.5))
    drafts = [trainer.batches.batch(step).labels_BAK.shape[-1] for step in range(40)]
    assert set(drafts) == {3, 5}
    assert 10 < drafts.count(3) < 30
    for wanted in drafts[:6]:
        report = trainer.run_step()
        assert len(report.accuracy) == wanted


def test_labels_are_the_tokens_after_the_anchor(project):
    batch = trainer_of(project).batches.batch(3)
    by_tokens = {c.tokens for c in project.conversations("train")}
    for row in range(len(batch.anchors_BA)):
        for a, anchor in enumerate(batch.anchors_BA[row].tolist()):
            block = [batch.anchor_tokens_BA[row, a].item()]
            block += batch.labels_BAK[row, a][batch.valid_BAK[row, a]].tolist()
            assert any(tokens[anchor : anchor + len(block)] == tuple(block) for tokens in by_tokens)
            assert len(block) >= 2


# Data


def test_answers_are_the_targets_own_greedy_continuations(project):
    model = project.target(longest=128)
    conversations = project.conversations("train")
    assert len(conversations) == 8
    for conversation in conversations[:3]:
        cache = KVCache(
            num_layers=6,
            num_slots=1,
            max_len=64,
            num_kv_heads=2,
            head_dim=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        length = len(conversation.tokens)
        with torch.inference_mode():
            hidden, _ = model(
                torch.tensor(conversation.tokens, dtype=torch.int32)[None],
                torch.zeros(1, dtype=torch.int32),
                torch.zeros(1, dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                cache,
                length,
            )
            greedy = model.logits(hidden)[0].argmax(-1).tolist()
        answer = conversation.answer
        assert list(conversation.tokens[answer:]) == greedy[answer - 1 : length - 1]


def test_a_target_that_writes_its_own_questions_keeps_to_its_template(tmp_path):
    project = Project(
        TrainingSettings(
            target=str(write_target(tmp_path / "target")),
            folder=str(tmp_path),
            drafter=DraftModelSettings(mask_token_id=MASK_TOKEN_ID),
        ),
        torch.float32,
    )
    template = ChatTemplate.of(ByteTokenizer())
    settings = GenerationSettings(rows=4, max_question=200, max_answer=10, sampled=0.5)
    target = project.target(longest=256, tapped=False)
    generator = Generator(target, template, settings, seed=5, workers=Workers(1))
    conversations = list(generator.run(12))
    assert conversations
    for conversation in conversations:
        question = conversation.prompt[len(template.head) : -len(template.bridge)]
        assert conversation.prompt == template.prompt(question)
        assert 1 <= len(question) <= 200
        assert template.bridge[0] not in question
        assert 1 <= len(conversation.tokens) - conversation.answer <= 10


def test_the_conversations_that_ship_can_be_trained_on(project, tmp_path):
    shipped = Path("dflash_core/drafters/smollm2-135m-dflash/conversations")
    settings = replace(project.settings, corpus=str(shipped), folder=str(tmp_path))
    assert len(unpack(Project(settings))) == 2
    assert unpack(Project(settings)) == [], "a project's own sets are left as they are"
    sets = {
        part: list(read_conversations(tmp_path / f"{part}.jsonl")) for part in ("train", "held_out")
    }
    prompts = [{conversation.prompt for conversation in part} for part in sets.values()]
    assert len(prompts[0]) == len(sets["train"]) >= 1000
    assert len(sets["held_out"]) >= 64 and not prompts[0] & prompts[1]
    assert max(max(c.tokens) for part in sets.values() for c in part) < 49152


def test_a_line_cut_off_by_a_kill_is_ignored_and_repaired(tmp_path):
    path = tmp_path / "train.jsonl"
    first, second = Conversation((1, 2, 3), 1, True), Conversation((4, 5), 1, False)
    path.write_text(first.line() + second.line()[:9])
    assert list(read_conversations(path)) == [first]
    with ConversationWriter(path) as writer:
        writer.append([second])
    assert list(read_conversations(path)) == [first, second]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("not json", "Expecting value"),
        ('{"tokens": [1, 2]}', "exactly the fields"),
        ('{"tokens": [1, "2"], "answer": 1, "greedy": true}', "tokens is not a list"),
        ('{"tokens": [1, 2], "answer": 2, "greedy": true}', r"answer = 2 is not within 1\.\.1"),
    ],
)
def test_a_bad_line_of_the_set_is_named(tmp_path, line, reason):
    path = tmp_path / "train.jsonl"
    path.write_text(Conversation((1, 2, 3), 1, True).line() + line + "\n")
    with pytest.raises(TrainingError, match=f"line 2: .*{reason}"):
        list(read_conversations(path))


def test_a_token_of_another_vocabulary_is_named(project, tmp_path):
    other = Project(replace(project.settings, folder=str(tmp_path)))
    with ConversationWriter(tmp_path / "train.jsonl") as writer:
        writer.append([Conversation((1, 2, 300), 1, True)])
    with pytest.raises(TrainingError, match="line 1: token 300 is not in the .* 256"):
        other.conversations("train")


def test_a_bad_line_of_a_prompts_file_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello"}\n{"text": "Hello"}\n')
    with pytest.raises(TrainingError, match=r'line 2: is not an object with the field "prompt"'):
        list(read_prompts(path))
    (tmp_path / "prompts.txt").write_text("Hello\n\nWorld\n")
    assert list(read_prompts(tmp_path / "prompts.txt")) == ["Hello", "World"]


def test_a_target_without_chat_template_is_refused():
    class Plain(ByteTokenizer):
        chat_template = None

    with pytest.raises(TrainingError, match="no chat template"):
        ChatTemplate.of(Plain())


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes: to a writer, what a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_no_conversation(tmp_path):
    path = tmp_path / "train.jsonl"
    conversation = Conversation((1, 2, 3), 1, True)
    size = len(conversation.line())
    with ConversationWriter(path) as writer, room_for(2 * size + 7):
        writer.append([conversation])
        with pytest.raises(TrainingError, match="cannot be written .*kept"):
            writer.append([conversation, conversation])
    assert path.stat().st_size == 2 * size + 7
    assert list(read_conversations(path)) == [conversation] * 2
    with ConversationWriter(path) as writer:
        writer.append([conversation])
    assert list(read_conversations(path)) == [conversation] * 3


def test_a_full_disk_loses_no_checkpoint(project, tmp_path):
    trainer = trainer_of(project)
    path = tmp_path / "checkpoint.pt"
    trainer.save(path, {})
    trainer.run_step()
    with room_for(path.stat().st_size // 2):
        with pytest.raises(TrainingError, match="the checkpoint before it is kept"):
            trainer.save(path, {})
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    trainer.resume(path, {})
    assert trainer.step == 0


def test_a_full_disk_loses_no_drafter(project, tmp_path):
    folder = project.export(trainer_of(project).optimizer.masters, {"steps": 1})
    before = (folder / "model.safetensors").read_bytes()
    with room_for(1000), pytest.raises(TrainingError, match="file before it is kept"):
        project.export(trainer_of(project).optimizer.masters, {"steps": 2})
    assert (folder / "model.safetensors").read_bytes() == before
    assert not list(folder.glob("*.tmp"))


def test_a_full_disk_loses_no_features(project, tmp_path):
    conversations, model = project.conversations("train"), project.target(longest=128)
    path = tmp_path / "features.bf16"
    whole = project.features_path("train").read_bytes()
    with room_for(len(whole) - 100), pytest.raises(TrainingError, match="more bytes are needed"):
        list(compute_features(model, conversations, path, Workers(2)))
    assert list(compute_features(model, conversations, path, Workers(2)))[-1] == len(conversations)
    assert path.stat().st_size == len(whole)


def test_interrupted_features_go_on_where_they_were(project, tmp_path):
    conversations = project.conversations("train")
    model = project.target(longest=128)
    path = tmp_path / "features.bf16"
    whole = project.features_path("train").read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    done = list(compute_features(model, conversations, path, Workers(2)))
    assert 0 < done[0] < len(conversations) == done[-1]
    resumed = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.bfloat16)
    expected = torch.frombuffer(bytearray(whole), dtype=torch.bfloat16)
    torch.testing.assert_close(resumed, expected, rtol=0.02, atol=0.02)


# Settings


def test_settings_are_typed_and_errors_name_the_field(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(
        "target: t\nfolder: f\ndrafter: {mask_token_id: 5, layers: 2, target_layer_ids: [1, 2]}\n"
    )
    settings = load_settings(path)
    assert settings.drafter == DraftModelSettings(5, layers=2, target_layer_ids=(1, 2))
    for text, message in {
        "folder: f\ndrafter: {mask_token_id: 5}\n": "required field target is missing",
        "target: t\nfolder: f\ndrafter: {}\n": "drafter: required field mask_token_id is missing",
        "target: t\nfolder: f\ndrafter: {layer: 2}\n": "drafter: unknown field 'layer'",
        "target: t\nfolder: f\noptimization: {steps: many}\n": "steps is 'many', not of type int",
        "- 1\n": "not a mapping",
    }.items():
        path.write_text(text)
        with pytest.raises(TrainingError, match=message):
            load_settings(path)
