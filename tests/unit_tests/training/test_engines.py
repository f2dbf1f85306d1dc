"""Both engines as a program uses them: any module, steps, evaluation, and bit-equal checkpoints."""

from __future__ import annotations

import io
import logging
import random
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron.core.device import Device
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.formats import format_of
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.store import LocalStore, open_store
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.training import engines
from megatron.training.checkpoint.run_state import split_path
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import FSDPEngine, MegatronEngine, ModuleEngine, build_engine
from megatron.training.model_loss import ModelLoss
from megatron.training.step import StepInfo
from tests.helpers.checkpoints import chunks_of
from tests.helpers.engine_contents import contents_of, differing
from tests.helpers.ranks import random_delays, run_ranks

OFFLOADED = OptimizerConfig(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    overlap_optimizer_with_forward=True,
)
SCHEDULE = LRScheduleConfig(lr=1e-2, lr_decay_style="cosine")
ENGINES: dict[str, EngineConfig] = {
    "megatron": EngineConfig(OFFLOADED, SCHEDULE, DataParallelConfig(), train_iters=8),
    "megatron on the device, bf16": EngineConfig(
        OptimizerConfig(), SCHEDULE, DataParallelConfig(), train_iters=8, compute_dtype="bf16"
    ),
    "fsdp2": EngineConfig(
        OptimizerConfig(), SCHEDULE, DataParallelConfig(use_torch_fsdp2=True), train_iters=8
    ),
}
ENGINES["fsdp2, our format"] = replace(ENGINES["fsdp2"], ckpt_format=FSDP_DTENSOR)


def gpt() -> nn.Module:
    """A GPT that transformers supports, with dropout, so that random states matter."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        normalization="RMSNorm",
        swiglu=True,
        ffn_hidden_size=24,
        add_bias_linear=False,
    )
    return GPTModel(config, 31)


def forward_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["tokens"], batch["labels"]).mean()


def batches(step: int, num_microbatches: int = 2) -> list[dict[str, torch.Tensor]]:
    """Returns this rank's microbatches of one step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    windows = torch.randint(31, (num_microbatches, 2, 9), generator=generator)
    return [{"tokens": w[:, :-1].contiguous(), "labels": w[:, 1:].contiguous()} for w in windows]


def make(config: EngineConfig, model: nn.Module | Callable[[], nn.Module] = gpt) -> ModuleEngine:
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(model)
    torch.manual_seed(77 + dist.get_rank())
    return engine


def step(engine: ModuleEngine, number: int) -> tuple[float, float]:
    result = engine.train_batch(batches(number), forward_step)
    return result.loss, result.grad_norm


def everything(engine: ModuleEngine) -> dict[str, Any]:
    """Returns copies of the local weights and optimizer states, counters and random states."""
    state = engine.state
    state.optimizer.synchronize()
    found: dict[str, Any] = {}
    for name, parameter in state.model.named_parameters():
        found[name] = local_tensor(parameter).detach().clone()
        for key, value in sorted(state.optimizer.optimizer.state[parameter].items()):
            found[f"{name}.{key}"] = (
                local_tensor(value).detach().clone() if torch.is_tensor(value) else value
            )
    found["rng"] = torch.get_rng_state()
    found["numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # noqa: NPY002
    found["python"] = random.getstate()
    found["step_info"] = engine.step_info()
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    assert one.keys() == other.keys()
    return [
        key
        for key, value in one.items()
        if not (torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key])
    ]


def zero(engine: ModuleEngine) -> None:
    engine.state.optimizer.synchronize()
    with torch.no_grad():
        for parameter in engine.model.parameters():
            local_tensor(parameter).zero_()
    torch.autograd.graph.increment_version(list(engine.model.parameters()))


# AReaL's two tests, with exact comparisons.


def _save_zero_load(name: str, folder: str) -> tuple[list[str], int, list[str]]:
    engine = make(ENGINES[name])
    meta = SaveLoadMeta(f"{folder}/saved", "dcp")
    before = everything(engine)
    engine.save(meta)
    zero(engine)
    num_zeroed = len(differences(before, everything(engine)))
    loss = engine.eval_batch(batches(0), forward_step)
    engine.load(meta)
    computes = (
        [] if engine.eval_batch(batches(0), forward_step) != loss else ["the loss is that of zeros"]
    )
    return differences(before, everything(engine)), num_zeroed, computes


@pytest.mark.parametrize("name", ENGINES)
def test_a_load_restores_zeroed_weights_bit_for_bit(tmp_path, name):
    for different, num_zeroed, computes in run_ranks(2, _save_zero_load, name, str(tmp_path)):
        assert different == []
        assert num_zeroed > 5, "zeroing changes the contents"
        assert computes == []


def _step_again(name: str, folder: str, weight_format: str) -> tuple[Any, ...]:
    """Steps, saves, steps, zeroes the weights, loads, and repeats the step."""
    engine = make(ENGINES[name])
    with_optim = weight_format == "dcp"
    hf_dtype = torch.float32 if weight_format == "hf" else None
    meta = SaveLoadMeta(f"{folder}/saved", weight_format, with_optim, hf_dtype=hf_dtype)
    step(engine, 0)
    engine.save(meta)
    saved = everything(engine)
    first = step(engine, 1), everything(engine)
    zero(engine)
    engine.load(meta)
    loaded = differences(saved, everything(engine))
    second = step(engine, 1), everything(engine)
    return loaded, first[0], second[0], differences(first[1], second[1])


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_after_loading_is_bit_equal_to_the_step_after_saving(tmp_path, name):
    for loaded, first, second, different in run_ranks(2, _step_again, name, str(tmp_path), "dcp"):
        assert loaded == []
        assert second == first
        assert different == []


@pytest.mark.parametrize("name", ENGINES)
def test_loading_weights_only_keeps_states_and_counters(tmp_path, name):
    """Hugging Face directories have weights only."""
    for loaded, _, _, different in run_ranks(2, _step_again, name, str(tmp_path), "hf"):
        assert loaded != []
        assert not [key for key in loaded if key.endswith(".weight")]
        assert "step_info" in loaded
        assert different != []


def _hand_over(first: str, second: str, folder: str) -> tuple[list[str], StepInfo]:
    """Saves in one engine, loads in another, and compares their next losses."""
    meta = SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True)
    one, other = make(ENGINES[first]), make(ENGINES[second])
    step(one, 0)
    one.save(meta)
    other.load(meta)
    losses = []
    for engine in (one, other):
        torch.manual_seed(78 + dist.get_rank())
        losses.append(step(engine, 1)[0])
    found = [] if losses[0] == pytest.approx(losses[1], rel=1e-5) else [f"losses {losses}"]
    return found, other.step_info()


@pytest.mark.parametrize(
    ("first", "second", "saved_as"),
    [
        ("megatron", "fsdp2", FSDP_DTENSOR),
        ("fsdp2", "megatron", TORCH_DCP),
        ("fsdp2, our format", "megatron", FSDP_DTENSOR),
        ("megatron", "fsdp2, our format", FSDP_DTENSOR),
    ],
)
def test_each_engine_loads_checkpoints_of_the_other(tmp_path, first, second, saved_as):
    for found, step_info in run_ranks(2, _hand_over, first, second, str(tmp_path)):
        assert found == []
        assert step_info == StepInfo(iteration=2, consumed_samples=16)
    assert format_of(LocalStore(tmp_path), "saved") == saved_as


def _save_beside_steps(folder: str) -> list[str]:
    """Steps during an asynchronous save, and compares the checkpoint with the state before it."""
    engine = make(ENGINES["fsdp2, our format"])
    step(engine, 0)
    saved = contents_of(engine)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with (
        random_delays(7),
        CheckpointManager.start(folder, engine.device, rank, world_size) as manager,
    ):
        manager.save(1, engine.state.contents(engine.device, with_optim=True), {})
        for number in (1, 2):
            step(engine, number)
        manager.finish()
    moved = len(differing(saved, contents_of(engine)))

    fresh = make(ENGINES["fsdp2"])
    checkpoint = PublishedCheckpoint.open(open_store(folder), "iter_0000001")
    contents = fresh.state.contents(fresh.device, with_optim=True, with_rng=False)
    wanted = check_contents(checkpoint, contents, ["rng.*"])
    load_entries(checkpoint, contents, wanted)
    return differing(saved, contents_of(fresh)) + ([] if moved > 20 else ["nothing moved"])


def test_fsdp2_saves_fsdp_dtensor_while_it_steps(tmp_path):
    assert run_ranks(2, _save_beside_steps, str(tmp_path)) == [[], []]


def test_an_unknown_checkpoint_format_is_rejected():
    with pytest.raises(ConfigError, match="ckpt_format: expected fsdp_dtensor or torch_dcp, got"):
        replace(ENGINES["fsdp2"], ckpt_format="torch_dist")


# The interface of an engine.


def _life(name: str) -> tuple[Any, ...]:
    engine = make(ENGINES[name])
    copy = engine.step_info()
    copy.iteration = 99
    result = engine.train_batch(iter(batches(0, 5)), forward_step, num_microbatches=3)
    rate = result.learning_rate, SCHEDULE.lr
    loss = engine.eval_batch(batches(1), forward_step)
    logits = engine.forward({"tokens": batches(1)[0]["tokens"]})
    own = [
        engine.forward(batch, lambda model, batch: model(batch["tokens"], batch["labels"]))
        for batch in batches(1)
    ]
    total = torch.stack([losses.mean() for losses in own]).mean().double()
    dist.all_reduce(total)
    return (
        engine.step_info(),
        rate,
        loss,
        float(total) / 2,
        tuple(logits.shape),
        logits.requires_grad,
    )


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_counts_steps_evaluates_and_returns_outputs(name):
    for step_info, (rate, peak), loss, expected, shape, has_grad in run_ranks(2, _life, name):
        assert step_info == StepInfo(iteration=1, consumed_samples=12)
        assert 0 < rate <= peak
        assert loss == pytest.approx(expected, rel=1e-5 if "bf16" not in name else 1e-2)
        assert shape == (2, 8, 31)
        assert not has_grad


def _masked_steps() -> tuple[list[tuple[bool, bool, bool]], list[int]]:
    """Returns, for each step, whether it is masked, changed the weights, and was skipped; and the
    iterations with a warning.
    """
    config = replace(ENGINES["megatron"], optimizer=OptimizerConfig(weight_decay=0.1))
    engine, records = make(config), []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger(engines.__name__).addHandler(handler)

    def learns_in_the_second_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> ModelLoss:
        is_learned = engine.step_info().iteration == 1
        return ModelLoss(forward_step(model, batch), weight=torch.tensor(float(is_learned)))

    found, weight = [], local_tensor(next(engine.model.parameters()))
    for number in range(6):
        before = weight.detach().clone()
        result = engine.train_batch(batches(number), learns_in_the_second_step)
        engine.state.optimizer.synchronize()
        has_moved = not torch.equal(weight, before)
        found.append((result.is_masked, has_moved, result.is_skipped))
    warned = [record.args[0] for record in records if record.levelno == logging.WARNING]
    return found, warned


def test_a_fully_masked_step_updates_weights_and_warns_at_growing_intervals():
    first, second = run_ranks(2, _masked_steps)
    for found, _ in (first, second):
        assert [is_masked for is_masked, _, _ in found] == [True, False, True, True, True, True]
        assert all(has_moved for _, has_moved, _ in found), "weight decay, and momentum later"
        assert not any(is_skipped for _, _, is_skipped in found)
    assert first[1] == [1, 3, 5], "the first, the second, and the fourth"
    assert second[1] == [], "only rank 0 warns"


class Net(nn.Module):
    """A custom module: no list of layers, a buffer, and initialized weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(6, 10)
        self.head = nn.Linear(10, 1)
        self.register_buffer("scale", torch.tensor([1.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = (x * self.scale).to(self.body.weight.dtype)
        return self.head(torch.tanh(self.body(scaled)))


def _net_losses(name: str | None) -> tuple[list[float], bool]:
    if name is None:
        config = replace(ENGINES["megatron"], parallel=DataParallelConfig(use_megatron_fsdp=False))
    else:
        config = ENGINES[name]
    engine = make(config, Net())
    x = torch.arange(48, dtype=torch.float32).reshape(8, 6) / 48
    share = len(x) // dist.get_world_size()
    own = x[dist.get_rank() * share :][:share]

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(model(batch["x"]).float(), batch["x"].sum(1, keepdim=True))

    losses = [engine.train_batch([{"x": own}], loss).loss for _ in range(4)]
    exact = [torch.equal(buffer, torch.tensor([1.1])) for buffer in engine.model.buffers()]
    return losses, exact == [True]


def test_a_custom_module_trains_the_same_in_every_engine():
    """Also in bf16, where the module's fp32 weights become main weights and buffers keep their
    values.
    """
    ((expected, _),) = run_ranks(1, _net_losses, None)
    assert expected[-1] < expected[0]
    for name in ENGINES:
        for losses, buffers_stay in run_ranks(2, _net_losses, name):
            assert losses == pytest.approx(expected, rel=2e-2 if "bf16" in name else 1e-5)
            assert buffers_stay


def _main_weights() -> bool:
    engine = make(ENGINES["megatron on the device, bf16"], Net())
    torch.manual_seed(5)
    whole = nn.Linear(6, 10).weight.detach()
    parameter = dict(engine.model.named_parameters())["body.weight"]
    rows = local_tensor(parameter)
    return (
        rows.dtype == torch.float32
        and torch.equal(rows, whole)
        and not torch.equal(rows, rows.bfloat16().float())
    )


def _short_evaluation(name: str) -> tuple[str, bool, bool]:
    engine = make(ENGINES[name])
    engine.model.eval()
    error = ""
    try:
        engine.eval_batch(iter(batches(0, 2)), forward_step, num_microbatches=3)
    except ValueError as failure:
        error = str(failure)
    parameters = {
        id(parameter)
        for group in engine.state.optimizer.param_groups
        for parameter in group["params"]
    }
    are_the_optimizers = {id(parameter) for parameter in engine.model.parameters()} == parameters
    return error, engine.model.training, are_the_optimizers


@pytest.mark.parametrize("name", ["megatron", "fsdp2"])
def test_a_failed_evaluation_does_not_change_the_model(name):
    expected = ("Expected 3 microbatches, got 2.", False, True)
    assert run_ranks(2, _short_evaluation, name) == [expected, expected]


def _half_on_meta(name: str) -> str:
    model = Net()
    model.head = nn.Linear(10, 1, device="meta")
    try:
        make(ENGINES[name], model)
    except ValueError as error:
        return str(error)
    return str(float(local_tensor(dict(model.named_parameters())["body.weight"]).std()))


def test_initialized_weights_are_not_reset():
    (message,) = run_ranks(1, _half_on_meta, "fsdp2")
    assert message == (
        "Expected parameters that are all real or all on meta, got head.weight, head.bias on meta "
        "and others real."
    )
    (deviation,) = run_ranks(1, _half_on_meta, "megatron on the device, bf16")
    assert float(deviation) == float(Net().body.weight.detach().std())


def test_initialized_weights_are_not_rounded_to_the_compute_dtype():
    assert run_ranks(1, _main_weights) == [True]


# Errors.


def _refusals(name: str, folder: str) -> dict[str, str]:
    engine = make(ENGINES[name])
    found = {}

    def note(what: str, action: Callable[[], object], *kinds: type[BaseException]) -> None:
        before = everything(engine)
        try:
            action()
            found[what] = "nothing"
        except kinds as error:
            found[what] = str(error)
        if differences(before, everything(engine)):
            found[what] = "the engine has changed"

    saved = SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True)
    weights = SaveLoadMeta(f"{folder}/weights", "dcp")
    note("nothing there", lambda: engine.load(saved), CheckpointError)
    engine.save(saved)
    engine.save(weights)
    step(engine, 0)
    note("saved twice", lambda: engine.save(saved), CheckpointError)
    note("weights alone", lambda: engine.load(replace(weights, with_optim=True)), CheckpointError)
    if dist.get_rank() == 0:
        (file,) = Path(saved.path).glob("__1_0.distcp")
        content = bytearray(file.read_bytes())
        file.write_bytes(content[: len(content) // 2])
    dist.barrier()
    note("half a file", lambda: engine.load(saved), CheckpointDamagedError)
    note("no batches", lambda: engine.train_batch([], forward_step), ValueError)
    note("an iterator", lambda: engine.eval_batch(iter([]), forward_step), ValueError)
    note(
        "a run's name",
        lambda: engine.save(replace(saved, path=f"{folder}/iter_0000003")),
        ValueError,
    )
    note("twice", lambda: engine.initialize(gpt), RuntimeError)
    return found


@pytest.mark.parametrize("name", ["megatron", "fsdp2"])
def test_invalid_calls_raise_on_all_ranks_and_change_nothing(tmp_path, name):
    for found in run_ranks(2, _refusals, name, str(tmp_path)):
        assert "changed" not in " ".join(found.values())
        assert found["saved twice"].startswith(
            f"Expected {tmp_path}/saved to be missing or empty, got"
        )
        assert "weights" in found["weights alone"]
        assert "__1_0.distcp" in found["half a file"]
        assert found["no batches"] == "Expected at least 1 microbatches, got 0."
        assert (
            found["an iterator"]
            == "Expected num_microbatches with an iterator of microbatches, got none."
        )
        assert found["a run's name"].startswith(
            "Expected a name other than iter_N, which runs write, got "
        )
        assert (
            found["nothing there"]
            == f"Expected a checkpoint in {tmp_path}/saved, got no such directory."
        )
        assert found["twice"] == "Expected initialize to be called once, got a second model."
    assert not list(Path(tmp_path).glob("*.saving"))


def _first_byte_of_data(file: Path) -> int:
    """Returns the offset of a tensor's data in the middle of the file."""
    if (file.parent / "index.json").exists():
        chunks = chunks_of(file.parent, 1)
        _, chunk = chunks[len(chunks) // 2]
        return chunk.offset
    metadata = FileSystemReader(file.parent).read_metadata()
    place = max(
        (info for info in metadata.storage_data.values() if info.relative_path == file.name),
        key=str,
    )
    with file.open("rb") as stream:
        stream.seek(place.offset)
        blob = stream.read(place.length)
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        (record,) = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
        data = archive.read(record)
    return place.offset + blob.index(data, record.header_offset)


def _flip_and_load(name: str, folder: str) -> tuple[str, list[str]]:
    engine = make(ENGINES[name])
    meta = SaveLoadMeta(f"{folder}/saved", with_optim=True)
    engine.save(meta)
    step(engine, 0)
    before = everything(engine)
    if dist.get_rank() == 0:
        file = Path(meta.path) / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        content[_first_byte_of_data(file)] ^= 1
        file.write_bytes(content)
    dist.barrier()
    try:
        engine.load(meta)
    except CheckpointDamagedError as error:
        return str(error), differences(before, everything(engine))
    return "loaded", []


@pytest.mark.parametrize("name", ["megatron", "fsdp2"])
def test_a_flipped_bit_is_detected_before_any_state_changes(tmp_path, name):
    """Both ranks raise, although only one of them reads the damaged data."""
    for message, different in run_ranks(2, _flip_and_load, name, str(tmp_path)):
        assert "__1_0.distcp" in message
        assert different == []


def test_invalid_save_load_meta_is_rejected():
    with pytest.raises(ValueError, match="Expected a weight format among"):
        SaveLoadMeta("there", "pickle")
    with pytest.raises(ValueError, match="Expected weights alone in the format hf"):
        SaveLoadMeta("there", "hf", with_optim=True)
    with pytest.raises(ValueError, match="Expected a tokenizer only with the format hf"):
        SaveLoadMeta("there", tokenizer=object())
    with pytest.raises(ValueError, match="Expected a hf_dtype only with the format hf"):
        SaveLoadMeta("there", hf_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"Expected a floating-point dtype .* got torch\.int8"):
        SaveLoadMeta("there", "hf", hf_dtype=torch.int8)
    for path in ("", "/", "runs/..", ".", "s3://bucket"):
        with pytest.raises(ValueError, match="Expected the path of a checkpoint's directory"):
            split_path(path)
    assert split_path("a") == (".", "a")
    assert split_path("/a/") == ("/", "a")
    assert split_path("memory://bucket/run/a") == ("memory://bucket/run", "a")


def test_build_engine_follows_the_config_and_initialize_comes_first():
    def check() -> bool:
        device, mesh = Device("cpu"), build_mesh("cpu", 1)
        kinds = [type(build_engine(config, device, mesh)) for config in ENGINES.values()]
        with pytest.raises(RuntimeError, match="Expected initialize to have been called"):
            build_engine(ENGINES["fsdp2"], device, mesh).step_info()
        return kinds == [MegatronEngine, MegatronEngine, FSDPEngine, FSDPEngine]

    assert run_ranks(1, check) == [True]
