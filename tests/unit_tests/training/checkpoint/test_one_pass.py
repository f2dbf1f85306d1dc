"""How often a load reads each byte, and how a run starts from a damaged checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.dist_checkpointing.config import CheckpointConfig
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.store import LocalStore, Then, ignore
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import FusedWeight
from megatron.training import engines
from megatron.training.checkpoint import loading
from megatron.training.checkpoint.loading import load_run
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.rng import rng_state
from tests.helpers.checkpoints import raw_bytes, read_index
from tests.helpers.ranks import run_ranks

CPU = Device("cpu")
# The checkpoint's options apply, to detect a load that installs them too early.
SCHEDULE = LRScheduleConfig(
    lr=1e-2, lr_decay_style="cosine", use_checkpoint_opt_param_scheduler=True
)
OPTIMIZERS = {
    "offloaded": OptimizerConfig(
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        overlap_optimizer_with_forward=True,
    ),
    # Such a state is read into separate memory, and then installed as a whole.
    "moments in fp8": OptimizerConfig(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16"),
}


class CountingStore(LocalStore):
    """Notes which blocks are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.ranges: list[tuple[str, int, int]] = []

    def read_into(
        self, path: str, offset: int, buffers: Iterable[memoryview], then: Then = ignore
    ) -> None:
        buffers = list(buffers)
        self.ranges.append((Path(path).name, offset, sum(each.nbytes for each in buffers)))
        super().read_into(path, offset, buffers, then)

    @property
    def reads(self) -> Counter[tuple[str, int]]:
        """How often each block was read, by its file and first byte."""
        return Counter(
            (file, offset + begin)
            for file, offset, nbytes in self.ranges
            for begin in range(0, nbytes, BLOCK_BYTES)
        )


def gpt() -> GPTModel:
    """With fused weights, and matrices of several blocks."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=384,
        num_attention_heads=2,
        swiglu=True,
        ffn_hidden_size=256,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(config, 31)


def make(optimizer: str, weight_decay: float = 0.01) -> ModuleEngine:
    config = EngineConfig(
        replace(OPTIMIZERS[optimizer], weight_decay=weight_decay),
        SCHEDULE,
        DataParallelConfig(),
        train_iters=8,
    )
    engine = build_engine(config, CPU, build_mesh("cpu", dist.get_world_size()))
    engine.initialize(gpt)
    return engine


def step(engine: ModuleEngine) -> None:
    tokens = torch.arange(18).reshape(2, 9) % 31
    engine.train_batch(
        [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}],
        lambda model, batch: model(batch["tokens"], batch["labels"]).mean(),
    )


def save(engine: ModuleEngine, root: Path) -> Path:
    """As a run saves it: under the name of its iteration."""
    engine.save(SaveLoadMeta(str(root / "saved"), with_optim=True))
    folder = root / checkpoint_name(engine.step_info().iteration)
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "saved").rename(folder)
    dist.barrier()
    return folder


def tensors(engine: ModuleEngine) -> dict[str, torch.Tensor]:
    """Of weights and states, as this rank has them."""
    state, found = engine.state, {}
    state.optimizer.synchronize()
    for name, parameter in state.model.named_parameters():
        found[name] = local_tensor(parameter).detach().clone()
        for kind, value in state.optimizer.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                found[f"{name}.{kind}"] = local_tensor(value).detach().clone()
    return found


def rest(engine: ModuleEngine) -> list[Any]:
    """What else a load changes."""
    state = engine.state
    # The schedule sets the rate in every step, so no load takes it.
    options = [
        {name: value for name, value in group.items() if name not in ("params", "lr")}
        for group in state.optimizer.param_groups
    ]
    random_states = {name: each.tolist() for name, each in rng_state(CPU).items()}
    return [engine.step_info(), state.schedule.state(), options, random_states]


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one if raw_bytes(one[name]) != raw_bytes(other[name])]


def flip(folder: Path, key: str) -> str:
    """Changes a bit in the middle of the last chunk of a tensor. Returns the name of its file."""
    tensor = read_index(folder).tensors[key]
    chunk = tensor.chunks[-1]
    if dist.get_rank() == 0:
        with (folder / chunk.file).open("r+b") as file:
            file.seek(chunk.offset + tensor.chunk_nbytes(chunk) // 2)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))
    dist.barrier()
    return chunk.file


def start(root: Path, engine: ModuleEngine, damaged: list[str] | None = None) -> str:
    """As a run starts; the path that is loaded."""
    config = CheckpointConfig(load=str(root))

    def note(path: str, reason: str) -> None:
        if damaged is not None:
            damaged.append(f"{Path(path).name}: {reason}")

    loaded = load_run(config, SCHEDULE, engine.state, CPU, on_damage=note)
    assert loaded is not None
    return Path(loaded.path).name


# Reads


def load(engine: ModuleEngine, folder: Path, *, with_optim: bool = True) -> None:
    engine.load(SaveLoadMeta(str(folder), with_optim=with_optim))


def _reads(root: str, how: str) -> tuple[list[tuple[int, int]], int]:
    """(how often blocks were read, and how many of them; the bytes that this rank wanted)"""
    folder = save(make("offloaded"), Path(root))
    engine = make("offloaded")
    store = CountingStore(Path(root))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "open_store", lambda _: store)
        patch.setattr(engines, "open_store", lambda _: store)
        if how == "start-up":
            start(Path(root), engine)
        else:
            if how == "after a step":
                step(engine)
            load(engine, folder)

    own = sum(part.nbytes for part in tensors(engine).values())
    return sorted(Counter(store.reads.values()).items()), own


@pytest.mark.parametrize(
    ("how", "times"), [("start-up", 1), ("before a step", 1), ("after a step", 2)]
)
def test_each_byte_is_read_once_and_twice_only_into_an_engine_after_a_step(tmp_path, how, times):
    """Counters and random states, of a few bytes, may be read by several ranks."""
    for reads, own in run_ranks(2, _reads, str(tmp_path), how):
        numbers = dict(reads)
        assert max(numbers) == times
        assert numbers[times] > 0.6 * sum(numbers.values()), "most reads are of tensors"
        assert own > 4 * BLOCK_BYTES


# Damage


class Fallen(NamedTuple):
    """A start from two checkpoints, of which the newer one is damaged; on one rank."""

    loaded: str
    file: str  # in which the damage is
    damaged: list[str]
    wrong: list[str]  # tensors that differ from the older checkpoint
    rest: list[Any]  # other data that differs
    is_next_right: bool  # the weights after a step more


def _fall_back(root: str, optimizer: str, key: str) -> Fallen:
    engine = make(optimizer)
    step(engine)
    save(engine, Path(root))
    older, older_rest = tensors(engine), rest(engine)
    step(engine)
    newer = save(engine, Path(root))
    following = tensors(engine)
    file = flip(newer, key)

    other, damaged = make(optimizer, weight_decay=0.5), []
    torch.manual_seed(99)
    loaded = start(Path(root), other, damaged)
    wrong = different(older, tensors(other))
    not_right = [pair for pair in zip(rest(other), older_rest, strict=True) if pair[0] != pair[1]]
    step(other)
    return Fallen(loaded, file, damaged, wrong, not_right, not different(following, tensors(other)))


@pytest.mark.parametrize(
    ("optimizer", "key"),
    [
        ("offloaded", "optimizer.state.decoder.final_layernorm.weight.exp_avg"),
        ("offloaded", "model.decoder.layers.0.mlp.up.weight"),
        ("moments in fp8", "model.decoder.layers.0.mlp.gate.weight"),
        ("moments in fp8", "optimizer.state.decoder.layers.0.mlp.up.weight.exp_avg_sq"),
    ],
)
def test_an_older_checkpoint_overwrites_everything_that_a_damaged_one_has_loaded(
    tmp_path, optimizer, key
):
    """Only one rank reads the damage, in the last group, or the second section of a fused weight.
    The others have read all of the newer checkpoint.
    """
    for fallen in run_ranks(2, _fall_back, str(tmp_path), optimizer, key):
        assert fallen.loaded == checkpoint_name(1)
        (damaged,) = fallen.damaged
        assert damaged.startswith(f"{checkpoint_name(2)}: ")
        assert repr(key) in damaged
        assert fallen.file in damaged
        assert fallen.wrong == []
        assert fallen.rest == []
        assert fallen.is_next_right


def _end(root: str, key: str) -> tuple[str, list[str], bool]:
    engine = make("offloaded")
    step(engine)
    flip(save(engine, Path(root)), key)
    other = make("offloaded", weight_decay=0.5)
    state, before, before_rest = other.state, tensors(other), rest(other)
    with pytest.raises(CheckpointError) as failure:
        start(Path(root), other)
    state.torn.clear()  # so that it can be looked at
    return str(failure.value), different(before, tensors(other)), rest(other) == before_rest


def test_a_start_without_a_whole_checkpoint_is_an_error_that_moves_no_counter(tmp_path):
    key = "optimizer.state.decoder.layers.0.mlp.up.weight.exp_avg"
    for message, touched, is_rest_left in run_ranks(2, _end, str(tmp_path), key):
        assert message.startswith(f"Expected a checkpoint in {tmp_path} that is whole, got: ")
        assert is_rest_left
        assert touched, "weights have been read into place: the run must end"


def _break_off(root: str, key: str) -> list[Any]:
    engine = make("offloaded")
    step(engine)
    whole = save(engine, Path(root))
    expected = tensors(engine)
    step(engine)
    damaged = save(engine, Path(root))
    flip(damaged, key)

    found: list[Any] = []
    trained, fresh = make("offloaded"), make("offloaded")
    step(trained)
    before = tensors(trained)
    for other in (trained, fresh):
        with pytest.raises(CheckpointDamagedError):
            load(other, damaged)
    found.append(different(before, tensors(trained)))

    for use in (step, lambda one: save(one, Path(root))):
        with pytest.raises(RuntimeError) as refused:
            use(fresh)
        found.append(str(refused.value))
    # Weights alone bring back only weights.
    load(fresh, whole, with_optim=False)
    with pytest.raises(RuntimeError) as refused:
        step(fresh)
    found.append(str(refused.value))
    load(fresh, whole)
    return [*found, different(expected, tensors(fresh))]


def test_an_engine_whose_load_broke_off_is_used_only_after_another(tmp_path):
    key = "optimizer.state.decoder.layers.0.mlp.up.weight.exp_avg"
    for trained, *refusals, after in run_ranks(2, _break_off, str(tmp_path), key):
        assert trained == []
        assert ["weights" in message for message in refusals] == [True, True, False]
        assert all("states" in message for message in refusals)
        assert after == []


def test_a_damaged_counter_of_a_fused_weight_is_found_before_anything_is_changed(tmp_path):
    key = "optimizer.state.decoder.layers.0.mlp.up.weight.step"
    for message, touched, is_rest_left in run_ranks(2, _end, str(tmp_path), key):
        assert key in message
        assert is_rest_left
        assert touched == []


def _refuse(root: str) -> tuple[str, list[str], bool]:
    engine = make("offloaded")
    step(engine)
    # Sections that have been trained apart, for different numbers of steps.
    gate_and_up = engine.model.decoder.layers[0].mlp.linear_fc1
    gate_and_up.fused = FusedWeight(
        tuple((f"other_{name}", rows) for name, rows in gate_and_up.fused.sections)
    )
    save(engine, Path(root))
    other = make("offloaded", weight_decay=0.5)
    before, before_rest = tensors(other), rest(other)
    with pytest.raises(CheckpointError) as failure:
        start(Path(root), other)
    assert not isinstance(failure.value, CheckpointDamagedError)
    return str(failure.value), different(before, tensors(other)), rest(other) == before_rest


def test_a_checkpoint_of_another_model_is_an_error_before_anything_is_changed(tmp_path):
    for message, touched, is_rest_left in run_ranks(2, _refuse, str(tmp_path)):
        assert "mlp.gate.weight" in message
        assert touched == []
        assert is_rest_left
