from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core import device as device_module
from megatron.core import drivers
from megatron.core.device import Device, kind_of
from megatron.core.drivers import (
    CudaDriver,
    Driver,
    PinError,
    choose_deterministic_algorithms,
    driver_of,
    kernels_of,
    kinds_of_accelerators,
    leave_failures_to_watchdog,
    prepare_cuda,
    register_driver,
    why_triton_fails,
)
from megatron.core.options import ConfigError


class Pretended(Driver):
    """A kind of accelerator with a test's values."""

    collective_backend = "its own"

    def __init__(self, count: int = 2, address: str | None = None) -> None:
        super().__init__("pretended")
        self.count, self.address = count, address
        self.current: list[int] = []

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def make_current(self, index: int) -> None:
        self.current.append(index)

    def pci_address(self, index: int) -> str | None:  # noqa: ARG002
        return self.address


@pytest.fixture
def pretended(monkeypatch):
    monkeypatch.setattr(drivers, "_drivers", dict(drivers._drivers))
    driver = Pretended()
    register_driver(driver)
    return driver


def test_a_kind_that_was_made_known_is_a_device_like_any_other(pretended):
    assert kinds_of_accelerators() == ["cuda", "pretended"]
    assert kind_of("pretended") == "pretended"
    device = Device.for_rank("pretended", 1, 2)
    assert device == Device("pretended", 1)
    assert device.collective_backend == "its own"
    assert device.runs_collectives_side_by_side
    assert pretended.current == [1]


def test_auto_selects_an_available_device(pretended, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kind_of() == "pretended"
    pretended.count = 0
    assert kind_of() == "cpu"


def test_an_unknown_kind_is_rejected_with_the_known_ones():
    with pytest.raises(ConfigError, match="--device: expected one of auto, cpu, cuda, got 'tpu'"):
        kind_of("tpu")
    with pytest.raises(ValueError, match="Expected a device of kind cpu, cuda, got 'tpu'"):
        driver_of("tpu")


def test_other_devices_than_accelerators_have_no_special_kernels():
    assert kernels_of(torch.device("cuda")) is driver_of("cuda")
    for kind in ("cpu", "meta"):
        driver = kernels_of(torch.device(kind))
        assert not driver.has_triton
        assert not driver.has_varlen_attention
        before = torch.backends.cuda.cudnn_sdp_enabled()
        with driver.attention_of_varying_shapes():
            assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_varying_shapes_leave_out_only_cudnn():
    enabled = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled)
    for chosen in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        with sdpa_kernel([chosen, SDPBackend.CUDNN_ATTENTION]):
            before = [ask() for ask in enabled]
            with driver_of("cuda").attention_of_varying_shapes():
                assert not torch.backends.cuda.cudnn_sdp_enabled()
                assert [ask() for ask in enabled] == before, "the user's choice"
            assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (SDPBackend.CUDNN_ATTENTION, True),
        (SDPBackend.FLASH_ATTENTION, False),
        (SDPBackend.EFFICIENT_ATTENTION, False),
        (SDPBackend.MATH, False),
    ],
)
def test_two_widths_are_taken_where_pytorch_chooses_cudnn(monkeypatch, chosen, expected):
    heads = [torch.randn(1, 2, 4, width) for width in (192, 192, 128)]
    assert not driver_of("cuda").takes_two_widths(*heads, 0.0, True), "they are on the CPU"
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_: chosen.value)
    assert driver_of("cuda").takes_two_widths(*heads, 0.0, True) is expected


def test_a_worker_of_a_device_has_it_as_its_current_one(pretended):
    lane = Device("pretended", 1).host_lane("of the second device")
    lane.enqueue(lambda: pretended.current.append(-1)).synchronize()
    assert pretended.current == [1, -1], "before any work"
    lane.close()


@pytest.mark.usefixtures("pretended")
def test_pinning_for_an_unsupported_device_kind_raises():
    with pytest.raises(
        PinError, match="pin 4096 bytes of host memory, got: no way to pin memory for pretended"
    ):
        Device("pretended").pin(8192, 4096)


@pytest.mark.parametrize(
    ("text", "node"), [("1\n", 1), ("-1\n", None), ("none\n", None), (None, None)]
)
def test_the_node_nearest_to_a_device_is_read_from_sysfs(
    pretended, tmp_path, monkeypatch, text, node
):
    monkeypatch.setattr(device_module, "_PCI_DEVICES", tmp_path)
    pretended.address = "0000:3b:00.0"
    if text is not None:
        (tmp_path / pretended.address).mkdir()
        (tmp_path / pretended.address / "numa_node").write_text(text)
    assert Device("pretended").numa_node == node
    assert Device("cpu").numa_node is None


def test_a_gpu_is_found_in_sysfs_by_its_pci_address(monkeypatch):
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    assert CudaDriver().pci_address(0) == "0000:3b:00.0"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert CudaDriver().pci_address(0) is None, "what torch does not tell"


@pytest.mark.parametrize(
    ("capability", "head_dim"),
    [((7, 5), 0), ((8, 0), 256), ((8, 6), 192), ((9, 0), 256), ((10, 0), 256), ((12, 0), 192)],
)
def test_flash_attention_takes_heads_by_the_gpus_generation(monkeypatch, capability, head_dim):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert CudaDriver().flash_head_dim(0) == head_dim


def test_free_memory_comes_before_all_of_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 - index, 8))
    assert Device("cuda", 1).memory_info() == (2, 8)


def test_the_cuda_error_of_a_failed_pin_is_cleared(monkeypatch):
    """CUDA keeps the last error until it is read, as every launch does."""
    left = ["out of memory"]

    class Number:
        def add_(self, _):
            if left:
                raise RuntimeError(left.pop())

    def refuse(*_):
        return 2

    runtime = SimpleNamespace(
        cudaHostRegister=refuse, cudaGetErrorString=lambda status: f"error {status}"
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch, "ones", lambda *_, **__: Number())
    with pytest.raises(PinError, match="error 2"):
        Device("cuda").pin(8192, 4096)
    assert left == []


OURS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


def test_pytorch_finds_failures_and_ends_no_rank(caplog):
    environment: dict[str, str] = {}
    leave_failures_to_watchdog(environment)
    assert environment == OURS
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "value", "warns"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1", True),
        ("TORCH_NCCL_ENABLE_MONITORING", "False", False),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", False),
        ("TORCH_DISTRIBUTED_DEBUG", "INFO", False),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", True),
        ("TORCH_NCCL_DESYNC_DEBUG", "1", True),
        ("NCCL_BLOCKING_WAIT", "1", True),
    ],
)
def test_variables_set_by_the_user_are_kept_with_one_warning(name, value, warns, caplog):
    environment = {name: value}
    leave_failures_to_watchdog(environment)
    assert environment == {**OURS, name: value}
    warnings = [record.getMessage().endswith(f": {name}={value}") for record in caplog.records]
    assert warnings == [True] * warns


def test_an_old_name_counts_as_long_as_the_new_one_is_not_set():
    """PyTorch prefers the new one, so that setting it would go over the user's head."""
    environment = {"NCCL_ASYNC_ERROR_HANDLING": "1"}
    leave_failures_to_watchdog(environment)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in environment


def test_a_gpu_prepares_for_a_watchdog_and_the_cpu_need_not(monkeypatch):
    for name in OURS:
        monkeypatch.setenv(name, "")  # so that later settings go again
        monkeypatch.delenv(name)
    Device("cpu").prepare_collectives()
    assert not OURS.keys() & os.environ.keys()
    Device("cuda").prepare_collectives()
    assert {name: os.environ[name] for name in OURS} == OURS


PREPARED = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}


@pytest.fixture
def starting_cuda(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """As in a PyTorch built with CUDA; the item is whether CUDA has started."""
    has_started = [False]
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_started[0])
    return has_started


def test_cuda_starts_with_a_queue_for_each_stream_and_segments_that_grow(starting_cuda):
    environment: dict[str, str] = {}
    prepare_cuda(environment)
    assert environment == PREPARED

    environment = {}
    starting_cuda[0] = True
    prepare_cuda(environment)
    assert environment == {}, "CUDA would not read it any more"


@pytest.mark.usefixtures("starting_cuda")
@pytest.mark.parametrize(
    "given",
    [
        {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"},
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    ],
)
def test_cuda_variables_set_by_the_user_are_kept(given):
    environment = dict(given)
    prepare_cuda(environment)
    expected = {**PREPARED, **given}
    if "PYTORCH_CUDA_ALLOC_CONF" in given:
        del expected["PYTORCH_ALLOC_CONF"]
    assert environment == expected


def test_a_pytorch_without_cuda_leaves_the_environment_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    environment: dict[str, str] = {}
    prepare_cuda(environment)
    assert environment == {}


@pytest.mark.usefixtures("starting_cuda")
@pytest.mark.parametrize("use", [lambda d: d.is_available(), lambda d: d.make_current(0)])
def test_the_environment_is_set_before_cuda_is_used(use, monkeypatch):
    for name in PREPARED:
        monkeypatch.setenv(name, "")  # so that later settings go again
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    seen = []

    def look(*_args: object) -> bool:
        seen.append({name: os.environ.get(name) for name in PREPARED})
        return True

    monkeypatch.setattr(torch.cuda, "is_available", look)
    monkeypatch.setattr(torch.cuda, "set_device", look)
    use(CudaDriver())
    assert seen == [PREPARED]


@pytest.mark.parametrize(
    ("queues", "rank", "num_warnings"),
    [("1", None, 1), ("1", "0", 1), ("1", "1", 0), ("32", "0", 0)],
)
def test_a_single_queue_is_one_warning_of_the_first_rank_that_uses_a_gpu(
    queues, rank, num_warnings, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    if rank is None:
        monkeypatch.delenv("RANK", raising=False)
    else:
        monkeypatch.setenv("RANK", rank)
    driver = CudaDriver()
    driver.is_available()
    assert caplog.records == [], "this process may compute on the CPU"
    for _ in range(2):
        driver.make_current(0)
    assert len(caplog.records) == num_warnings


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs PyTorch built with CUDA")
def test_pytorch_reads_the_allocators_settings_after_it_has_been_imported():
    program = (
        "import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:neither'; "
        "torch._C._accelerator_setAllocatorSettings('max_split_size_mb:64')"
    )
    environment = {k: v for k, v in os.environ.items() if "ALLOC_CONF" not in k}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert "neither" in done.stderr, "an error about the value"


def test_collectives_on_a_gpu_start_in_launch_order_if_requested(monkeypatch):
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    Device("cuda").order_collectives()
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "0", "the user's"
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT")
    Device("cpu").order_collectives()
    assert "NCCL_LAUNCH_ORDER_IMPLICIT" not in os.environ
    Device("cuda").order_collectives()
    assert os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] == "1"


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_triton_needs_a_c_compiler_and_the_headers_of_python(monkeypatch, tmp_path):
    for name in ("CC", "CPATH", "C_INCLUDE_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "gcc" in (why_triton_fails() or "")
    monkeypatch.setenv("CC", "mycc")
    assert "mycc" in (why_triton_fails() or "")

    (tmp_path / "mycc").write_text("#!/bin/sh\n")
    (tmp_path / "mycc").chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_paths", lambda _scheme: {"include": f"{tmp_path}/python"})
    assert f"no Python.h in {tmp_path}/python" in (why_triton_fails() or "")
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", f":{tmp_path}")
    assert why_triton_fails() is None

    monkeypatch.setattr(drivers, "find_spec", lambda _name: None)
    assert "triton" in (why_triton_fails() or "")


@pytest.mark.parametrize(
    "given", [{}, {"NCCL_ALGO": "^NVLS"}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}]
)
def test_libraries_add_up_in_one_order_unless_the_user_chose_another(given):
    environment = dict(given)
    choose_deterministic_algorithms(environment)
    assert environment == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "TORCHINDUCTOR_DETERMINISTIC": "1",
        **given,
    }


_COMPILES = """
import os, sys
import megatron.training.pretrain
from megatron.core.drivers import choose_deterministic_algorithms
choose_deterministic_algorithms()
import torch._inductor.config
assert torch._inductor.config.deterministic
"""


def test_compiled_layers_are_imported_after_that_and_measure_no_choices():
    subprocess.run([sys.executable, "-c", _COMPILES], check=True)


def test_only_a_gpus_libraries_are_set_for_the_same_bits_each_time(monkeypatch):
    names = ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "TORCHINDUCTOR_DETERMINISTIC")
    for name in names:
        monkeypatch.setenv(name, "")  # so that later settings go again
        monkeypatch.delenv(name)
    with Device("cpu").deterministic():
        assert not any(name in os.environ for name in names)
    with Device("cuda").deterministic():
        assert all(name in os.environ for name in names)
