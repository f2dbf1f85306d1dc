"""`plan`: a run's memory and time, the settings that fit, and rejected requests."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.device import Device
from megatron.core.optimizer.config import Overlap
from megatron.core.options import ConfigError
from megatron.training.step_memory import fit, rows_of
from megatron_hybrid.plan import measure
from megatron_hybrid.plan.answer import Limits, answer
from megatron_hybrid.plan.command import main
from megatron_hybrid.plan.planned_run import OFFLOADING, PlannedRun
from megatron_hybrid.plan.quantities import (
    flops,
    rate,
    size,
    size_or_zero,
    whole_number,
)
from megatron_hybrid.plan.step_time import Machine
from megatron_hybrid.plan.table import format_answer
from megatron_hybrid.plan.workload import work_of

ROOT = Path(__file__).resolve().parents[3]
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 301,
}
FLAGS = """--num-layers 6 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm
    --disable-bias-linear --attention-dropout 0 --hidden-dropout 0 --seq-length 64
    --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --bf16
    --tokenizer-type NullTokenizer --vocab-size 300 --make-vocab-size-divisible-by 1""".split()
MACHINE = Machine(flops=1e9, device_bytes=1e9, link_bytes=1e8, host_bytes=1e8)
UNRESERVED = ["--gpu-reserve", "0GB"]  # for devices of megabytes
RATES = ["--flops", "1TFLOP/s", "--link", "50GB/s", "--host-bandwidth", "100GB/s"]


@pytest.fixture
def folder(tmp_path):
    """A directory of the transformers library, without weights and tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path)


def planned(capsys: Any, *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: Any, *argv: str) -> str:
    with suppress(SystemExit):  # by argparse, below a line of usage
        assert main(list(argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *_, line = err.splitlines()
    assert line.startswith("plan: ")
    return str(line)


@pytest.mark.parametrize("main_grads", ["fp32", "bf16"])
def test_sums_over_the_microbatches_of_instances_take_memory_while_they_are_reduced(main_grads):
    flags = [*FLAGS, "--num-distributed-optimizer-instances", "2", "--main-grads-dtype", main_grads]
    one, many = (
        PlannedRun([*flags, "--global-batch-size", str(size)], 4, "cuda").memory(None)
        for size in (4, 16)
    )
    groups = [*one.states.shards.groups]
    sums = [group.partial_grads_nbytes for group in groups]
    assert many.in_use.in_backward - one.in_use.in_backward == sum(sums) - 2 * max(sums) > 0
    # Sums in bf16 are widened before they are sent.
    widened = [2 * nbytes if main_grads == "bf16" else 0 for nbytes in sums]
    assert [group.reduction_nbytes for group in groups] == widened
    on_cpu = PlannedRun([*flags, "--global-batch-size", "16"], 4, "cpu").memory(None)
    whole = [group.whole_grads_nbytes for group in groups]
    assert [2 * group.whole_grads_nbytes for group in on_cpu.states.shards.groups] == whole
    narrower = many.in_use.in_backward - on_cpu.in_use.in_backward - max(widened)
    assert narrower == (sum(sorted(whole[:-1])[-2:]) + whole[-1]) // 2


def test_a_model_directory_is_the_only_required_argument(folder, capsys):
    found = planned(capsys, "--hf-model", folder)
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 160 + 2 * 64
    assert found["parameters"] == 6 * layer + 2 * 301 * 64 + 64
    assert (found["ranks"], found["fraction"], found["step"]) == (1, None, None)
    assert found["device_bytes"] == sum(row["device"] for row in found["memory"].values())
    assert found["tokens_per_step"] == 4096


def test_flags_of_a_run_have_the_same_effect_in_a_plan(folder, capsys):
    short = ["--hf-model", folder, "--bf16", "--gpus", "2", "--seq-length", "8"]  # no peak in loss
    plain, frozen = planned(capsys, *short), planned(capsys, *short, "--freeze", "embedding")
    assert frozen["memory"]["gradients"]["device"] < plain["memory"]["gradients"]["device"]
    assert frozen["checkpoint_bytes"] < plain["checkpoint_bytes"]
    plain = planned(capsys, "--hf-model", folder, "--bf16", "--gpus", "2")
    longer = planned(capsys, "--hf-model", folder, "--bf16", "--gpus=2", "--seq-length=8192")
    assert longer["memory"]["activations"]["device"] == pytest.approx(
        2 * plain["memory"]["activations"]["device"], rel=0.01
    )
    steps = planned(capsys, "--hf-model", folder, "--gpus", "2", "--global-batch-size", "16")
    assert (steps["tokens_per_step"], steps["microbatches"]) == (65536, 8)


def test_a_file_of_settings_is_planned_as_it_is_run(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text((ROOT / "examples" / "qwen3_5_proxy.yaml").read_text())
    own = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "300", "--mock-data"]
    text = file.read_text().replace("data-path: data/stdlib_text_document\n", "")
    file.write_text(text.replace("tokenizer-model: data/stdlib_tokenizer.json\n", ""))
    found = planned(capsys, "--config", str(file), *own)
    assert found["microbatches"] == 2
    assert found["compute_dtype"] == "bf16"


def test_a_file_needs_neither_the_data_nor_the_tokenizer_that_it_names(capsys):
    file = str(ROOT / "examples" / "llama3_8b_offload_1gpu.yaml")
    found = planned(capsys, "--config", file, "--gpu-memory", "80GB")
    assert found["parameters"] == 8_030_261_248
    assert found["tokens_per_step"] == 32 * 8192


def test_the_data_of_a_file_need_not_exist(tmp_path, capsys):
    model = [*FLAGS[: FLAGS.index("--mock-data")], "--data-path", "0.3", "no/a", "0.7", "no/b"]
    model += ["--tokenizer-model", "no/tokenizer.json", "--make-vocab-size-divisible-by", "1"]
    file = tmp_path / "run.yaml"
    file.write_text("lr: 1.0e-3\n")
    assert "--vocab-size" in refused(capsys, "--config", str(file), *model)
    file.write_text("vocab-size: 301\n")
    found = planned(capsys, "--config", str(file), *model, "--sft")
    assert found["parameters"] == planned(capsys, "--config", str(file), *FLAGS)["parameters"]


def test_a_part_of_the_device_is_left_free(folder, capsys):
    flags = ["--hf-model", folder, "--gpu-memory"]
    for memory, reserve in (("80GB", 4_000_000_000), ("24GB", 2_000_000_000)):
        assert planned(capsys, *flags, memory)["device_reserve_bytes"] == reserve
    whole = planned(capsys, "--hf-model", folder)["device_bytes"]
    exact = planned(capsys, *flags, f"{whole + 500}B", "--gpu-reserve", "500B")
    assert exact["fraction"] is None
    tight = planned(capsys, *flags, f"{whole + 499}B", "--gpu-reserve", "500B")
    assert tight["fraction"] > 0
    assert "reserved (--gpu-reserve)" in refused(capsys, *flags, "1GB")
    assert "--gpu-memory" in refused(capsys, "--hf-model", folder, "--gpu-reserve", "1GB")


def test_one_rank_adds_only_gradients_to_the_memory_at_rest(folder, capsys):
    kinds = {"whole layers in use", "gradients in backward"}
    flags = ["--hf-model", folder, "--bf16", "--seq-length", "8"]
    alone = planned(capsys, *flags)["memory"].keys() & kinds
    four = planned(capsys, *flags, "--gpus", "4")["memory"].keys() & kinds
    assert (alone, four) == ({"gradients in backward"}, {"whole layers in use"})


def test_the_time_of_a_step_comes_with_the_machines_rates(folder, capsys):
    flags = ["--hf-model", folder, "--bf16"]
    found = planned(capsys, *flags, *RATES)
    assert found["step"]["seconds"] == pytest.approx(sum(found["step"]["parts"].values()))
    assert found["step"]["bound"] == "compute"
    rate = found["tokens_per_step"] / found["step"]["seconds"]
    assert found["step"]["tokens_per_second"] == pytest.approx(rate)
    assert found["checkpoint_bytes"] == found["parameters"] * (4 + 8)
    slower = planned(capsys, *flags, *RATES[:4], "--host-bandwidth", "1GB/s")
    hidden = "largest_fraction_that_is_hidden"
    assert slower[hidden] <= found[hidden]


# What fits.

RUN = PlannedRun(FLAGS, 2, "cpu")
DEVICE = PlannedRun(FLAGS, 2, "cuda")


def test_muon_has_its_states_and_its_arithmetic_in_the_plan(folder, capsys):
    flags = ["--hf-model", folder, *RATES, "--gpu-bandwidth", "3TB/s", "--gpus", "2"]
    muon, adam = (planned(capsys, *flags, "--optimizer", rule) for rule in ("muon", "adam"))
    # Of each layer: queries and output, keys and values, and the three of the MLP.
    shapes = [(64, 64)] * 2 + [(32, 64)] * 2 + [(64, 160)] * 3
    matrices = 6 * sum(less * more for less, more in shapes)
    flops = 6 * sum(5 * (4 * less**2 * more + 2 * less**3) for less, more in shapes)
    assert flops == 6 * sum(
        less * more * (20 * less + 10 * less**2 / more) for less, more in shapes
    )

    assert adam["step"]["muon_share"] == 0
    assert muon["checkpoint_bytes"] == adam["checkpoint_bytes"] - 4 * matrices
    seconds = [one["step"]["parts"]["compute"] for one in (adam, muon)]
    share = seconds[1] / seconds[0] - 1
    assert muon["step"]["muon_share"] == pytest.approx(share, rel=1e-2)
    assert flops / 2 / 1e12 == pytest.approx(seconds[1] - seconds[0], rel=1e-2), "of two ranks"


@pytest.mark.parametrize(("num_ranks", "overlap"), [(1, Overlap.ALL), (2, Overlap.FETCH)])
def test_matrices_of_muon_go_up_and_come_down_and_several_ranks_wait_for_them(num_ranks, overlap):
    muon, adam = (
        PlannedRun([*FLAGS, *OFFLOADING, "--optimizer", rule], num_ranks, "cuda")
        for rule in ("muon", "adam")
    )
    assert adam.matrix_share == 0 < muon.matrix_share < 1
    matrices = muon.matrix_share * muon.trained_numel / num_ranks
    works = [work_of(run, 1.0) for run in (muon, adam)]
    for way in ("up", "down"):
        nbytes = [sum(getattr(group, way) for group in work.groups) for work in works]
        assert nbytes[0] - nbytes[1] == pytest.approx(2 * matrices, rel=1e-2)
    assert [work.overlap for work in works] == [overlap, Overlap.ALL]


def test_fractions_put_one_more_group_into_host_memory_each():
    plans = [DEVICE.plan(fraction) for fraction in DEVICE.fractions]
    assert [sum(group.is_on_host for group in plan.groups) for plan in plans] == [*range(8)]
    assert DEVICE.fractions[-1] == 1.0


@given(st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_the_smallest_fraction_that_fits_fits_and_the_one_below_does_not(share):
    least = DEVICE.memory(1.0).device_nbytes
    most = DEVICE.memory(0.0).device_nbytes
    limit = least + share * (most - least) // 100
    found = answer(DEVICE, Limits(device=limit), None).smallest_fitting
    assert found is not None
    assert DEVICE.memory(found).device_nbytes <= limit
    below = [fraction for fraction in DEVICE.fractions if fraction < found]
    assert all(DEVICE.memory(fraction).device_nbytes > limit for fraction in below)


def test_more_in_host_memory_is_less_on_the_device_and_never_faster():
    kinds = [DEVICE.memory(fraction) for fraction in DEVICE.fractions]
    on_device = [memory.device_nbytes for memory in kinds]
    on_host = [memory.host_nbytes for memory in kinds]
    assert on_device == sorted(on_device, reverse=True)
    assert len(set(on_device)) == len(on_device)
    assert on_host == sorted(on_host)
    assert all(sum(r.device for r in rows_of(m).values()) == m.device_nbytes for m in kinds)
    assert all(sum(r.host for r in rows_of(m).values()) == m.host_nbytes for m in kinds)


def test_the_largest_hidden_fraction_is_hidden_and_the_next_is_not():
    found = answer(DEVICE, Limits(), MACHINE).largest_hidden
    assert found is not None
    assert 0 < found < 1
    number = DEVICE.fractions.index(found)
    hidden = []
    for fraction in DEVICE.fractions[number : number + 2]:
        flags = [*FLAGS, *OFFLOADING, "--optimizer-offload-fraction", str(fraction)]
        run = PlannedRun(flags, 2, "cuda")
        hidden.append(answer(run, Limits(), MACHINE).time.hides_offloading)
    assert hidden == [True, False]


def test_a_run_that_does_not_fit_without_offloading_is_offloaded():
    limit = (DEVICE.memory(None).device_nbytes + DEVICE.memory(1.0).device_nbytes) // 2
    found = answer(DEVICE, Limits(device=limit), None)
    assert found.is_chosen
    assert found.fraction == found.smallest_fitting
    assert found.memory.device_nbytes <= limit
    plenty = answer(DEVICE, Limits(device=1 << 40), None)
    assert (plenty.is_chosen, plenty.fraction) == (False, None)


def _with_activations(fraction: float | str) -> PlannedRun:
    # So long that activations, not gradients, are most of the peak.
    flags = ["--seq-length", "256", "--activation-offload-min-kib", "1"]
    flags += ["--activation-offload", "--activation-offload-fraction", str(fraction)]
    return PlannedRun([*FLAGS, *flags], 1, "cuda")


def test_the_largest_activation_fraction_that_is_hidden_is_hidden_and_the_next_is_not():
    whole = answer(_with_activations(1.0), Limits(), MACHINE)
    forward, copies = whole.time.forward, whole.time.activations
    # A link that moves three and a half layers' in a forward.
    machine = replace(MACHINE, link_bytes=MACHINE.link_bytes * copies / forward * 3.5 / 4)
    found = answer(_with_activations(1.0), Limits(), machine)
    assert found.time.exposed_activations > 0
    assert found.activation_fraction == 0.75, "three of the four that may move"
    assert "largest activation offload fraction that is hidden  0.75" in format_answer(found)
    assert "of forward" in format_answer(found)
    others = [answer(_with_activations(f), Limits(), machine) for f in (0.5, 0.75, "auto")]
    assert [other.time.exposed_activations for other in others] == [0.0] * 3
    assert [other.activation_fraction for other in others] == [0.75] * 3
    assert found.to_json()["largest_activation_fraction_that_is_hidden"] == 0.75
    on_device = [one.memory.device_nbytes for one in (*others, found)]
    assert on_device[0] > on_device[1] > on_device[2] == on_device[3]
    none = answer(DEVICE, Limits(), machine)
    assert none.activation_fraction is None


AUTO = [*FLAGS, "--optimizer-cpu-offload", "--optimizer-offload-fraction", "auto"]


def test_auto_is_planned_as_a_run_chooses_it():
    run = PlannedRun(AUTO, 2, "cuda")
    for share in (0, 30, 70, 100):
        least, most = (run.memory(fraction).device_nbytes for fraction in (1.0, 0.0))
        limit = least + share * (most - least) // 100
        found = answer(run, Limits(device=limit), None)
        fraction, memory = fit(run.model, run.config.engine(), 2, "cuda", limit)
        assert (found.fraction, found.memory) == (fraction, memory)
        assert found.is_chosen
        assert f"offload fraction {fraction:g}, the smallest" in format_answer(found)
    assert found.fraction == 0.0
    with pytest.raises(ConfigError, match="No offload fraction fits"):
        answer(run, Limits(device=least - 1), None)
    with pytest.raises(ConfigError, match="--gpu-memory"):
        answer(run, Limits(), None)
    on_cpu = answer(PlannedRun(AUTO, 2, "cpu"), Limits(), None)
    assert (on_cpu.fraction, on_cpu.is_chosen) == (0.0, False)


def test_a_host_that_is_the_device_holds_both():
    both = RUN.memory(None).device_nbytes * 2
    assert answer(RUN, Limits(host=both), None).fraction is None
    with pytest.raises(ConfigError, match="Expected host memory for compute weights"):
        answer(RUN, Limits(host=both // 2), None)


# Rejected requests.


def test_a_run_that_cannot_fit_is_an_error_with_the_sum(folder, capsys):
    model = ["--hf-model", folder, "--bf16", *UNRESERVED]
    text = refused(capsys, *model, "--gpu-memory", "1MB")
    assert " + activations " in text
    assert "at the offload fraction 1, got 1.00 MB" in text

    offloaded = ["--optimizer-cpu-offload", "--optimizer-offload-fraction", "0"]
    least = planned(capsys, "--hf-model", folder, "--bf16", "--optimizer-cpu-offload")
    limit = ["--gpu-memory", f"{least['device_bytes'] + 10000}B"]
    assert "The smallest fraction that fits is 1." in refused(capsys, *model, *offloaded, *limit)
    text = refused(capsys, *model, *limit, "--host-memory", "1MB")
    assert "host memory for main weights " in text


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("", "--hf-model"),
        ("--hf-model X --config Y", "--hf-model"),
        ("--gpus 0", "--gpus"),
        ("--hf-model nowhere/there", "hf download nowhere/there"),
        ("--hf-model X --gpu-memory 80", "--gpu-memory"),
        ("--hf-model X --host-memory 0GB", "--host-memory"),
        ("--hf-model X --link 50GB", "--link"),
    ],
)
def test_bad_flags_are_one_line(capsys, argv, flag):
    assert flag in refused(capsys, *argv.split())


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--gpus 3 --global-batch-size 4", "--global-batch-size: expected a multiple of 3"),
        ("--no-such-flag", "--no-such-flag"),
        ("--flops 1TFLOP/s --link 50GB/s", "--host-bandwidth"),
    ],
)
def test_errors_of_the_run_are_errors_of_the_plan(folder, capsys, flags, told):
    assert told in refused(capsys, "--hf-model", folder, *flags.split())


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (size, "80GB", 80 * 10**9),
        (size, "512GiB", 512 * 2**30),
        (size, "1.5 TB", 1.5e12),
        (size_or_zero, "0GB", 0),
        (rate, "50GB/s", 50e9),
        (rate, "1GiB/s", 2**30),
        (flops, "400TFLOP/s", 400e12),
        (flops, "1.5PFLOPS", 1.5e15),
        (whole_number, "8", 8),
    ],
)
def test_quantities_have_units(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize("parse", [size, rate, flops, whole_number])
@pytest.mark.parametrize(
    "text", ["", "80.5", "GB", "-80GB", "80gb", "80GB/h", "nanGB", "1e3GB", "\uff180GB", "80 GB "]
)
def test_other_quantities_are_errors(parse, text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(size, "0GB"), (size, "0.4B"), (rate, "0GB/s"), (flops, "0FLOPS"), (whole_number, "0")],
)
def test_a_quantity_of_0_is_an_error(parse, text):
    with pytest.raises(argparse.ArgumentTypeError):
        parse(text)


@pytest.mark.parametrize("options", [["--exp-avg-dtype", "bf16"], ["--optimizer", "muon"]])
def test_the_host_is_measured_with_states_that_are_not_offloaded(monkeypatch, options):
    monkeypatch.setattr(measure, "_PASS_NUMEL", 1 << 10)
    monkeypatch.setattr(measure, "_SECONDS", 0.0)
    run = PlannedRun([*FLAGS, *options], 2, "cpu")
    assert measure._host_pass(measure.job_of(run), Device("cpu")) > 0


@pytest.mark.wide
def test_the_program_measures_this_machine(tmp_path):
    command = [sys.executable, "-m", "megatron_hybrid", "plan", "--json"]
    command += ["--config", str(tmp_path / "run.yaml")]
    lines = []
    words = " ".join(FLAGS).split("--")[1:]
    for word in words:
        name, _, value = word.strip().partition(" ")
        lines.append(f"{name}: {value or 'true'}")
    (tmp_path / "run.yaml").write_text("\n".join(lines) + "\n")
    measuring = ["--gpus", "2", "--measure", "--device", "cpu"]
    done = subprocess.run(
        [*command, *measuring], cwd=ROOT, capture_output=True, text=True, timeout=600, check=True
    )
    found = json.loads(done.stdout)
    parts = found["step"]["parts"]
    assert parts["compute"] > 0
    assert parts["interconnect"] > 0, "two ranks on one machine"
    assert found["largest_fraction_that_is_hidden"] == 0, (
        "a CPU run has no cores to spare for the pass"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]
