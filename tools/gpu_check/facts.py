"""The machine, and the host kernel for it."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.gpu_check.findings import Findings

ROOT = Path(__file__).resolve().parents[2]
_LEAST_TORCH = (2, 11)
_MODULES = {"PyYAML": "yaml"}  # packages whose module has another name
_KERNEL = "megatron/core/optimizer/kernels/libhost_adam.so"


def facts(findings: Findings) -> None:
    """What this runs on. What is missing is one line."""
    missing = [
        name
        for name in dependencies()
        if importlib.util.find_spec(_MODULES.get(name, name)) is None
    ]
    findings.figure("missing packages", ", ".join(missing) or "none", is_telling=True)
    findings.figure("python", platform.python_version())
    findings.expect_at_least("python", sys.version_info[:2], (3, 10))
    findings.figure("cores", len(os.sched_getaffinity(0)), is_telling=True)
    for name in ("MemTotal", "MemAvailable"):
        findings.figure(name, _meminfo(name) / 2**30, "GiB", is_telling=name == "MemAvailable")
    findings.figure("cpu", _cpu_model())
    findings.figure("huge pages", _text("/sys/kernel/mm/transparent_hugepage/enabled"))
    findings.figure("driver", _text("/proc/driver/nvidia/version").partition("\n")[0])
    for package in ("torch", "triton", "numpy", "einops", "xxhash"):
        findings.figure(package, _version(package))

    from tools.gpu_check.accelerator import open_accelerator

    _torch_facts(findings)
    if not findings.simulate and not _has_gpu(findings):
        return
    accelerator = open_accelerator(findings)
    _device_facts(findings, accelerator.device.description, accelerator.memory_bytes())


def build(findings: Findings) -> None:
    """Compiles a missing or stale host kernel. Without a compiler, torch does its work."""
    library, sources = ROOT / _KERNEL, sorted((ROOT / _KERNEL).parent.glob("host_adam*"))
    newest = max(source.stat().st_mtime for source in sources if source.suffix in (".cpp", ".h"))
    if not library.exists() or library.stat().st_mtime < newest:
        _compile(findings)
    from megatron.core.optimizer.kernels.host_adam import HostAdam, available_bodies

    findings.figure("bodies", ", ".join(available_bodies()))
    findings.figure("host kernel", HostAdam(1).body, is_telling=True)
    if HostAdam(1).body == "torch":
        findings.note(
            "The host kernel is not there: torch computes the same bits, slower. Speeds will be "
            "lower."
        )
    # Without a compiler the torch path is what can be had, and it is checked like the other.
    findings.expect(
        "the kernel was built, or there is no compiler",
        library.exists() or _compiler() is None,
        True,
    )


def dependencies() -> list[str]:
    """The packages that pyproject.toml names, without tomllib, which Python 3.10 lacks."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    if listed is None:
        raise ValueError("Expected a list of dependencies in pyproject.toml, got none.")
    return re.findall(r'"([A-Za-z0-9_-]+)', listed.group(1))


def _compile(findings: Findings) -> None:
    start = time.monotonic()
    compiler = _compiler()
    if compiler is None:
        return
    source = (ROOT / _KERNEL).with_name("host_adam.cpp")
    done = subprocess.run(
        [*compiler, *_flags(), str(source), "-o", str(ROOT / _KERNEL)],
        capture_output=True,
        text=True,
    )
    findings.figure("compiling", time.monotonic() - start, "s")
    if done.returncode:
        findings.note(f"compiling the host kernel failed: {done.stderr[-1000:]}")


def _compiler() -> list[str] | None:
    """The command of a C++ compiler; None: there is none."""
    for command in (shlex.split(os.environ.get("CXX", "")), ["c++"], ["g++"]):
        if command and shutil.which(command[0]):
            return command
    return None


def _flags() -> list[str]:
    """The flags of setup.py, which cannot be imported without building, or without setuptools."""
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "FLAGS":
            return list(ast.literal_eval(statement.value))
    raise ValueError("Expected FLAGS in setup.py, got none.")


def _torch_facts(findings: Findings) -> None:
    import torch

    findings.figure("CUDA of torch", torch.version.cuda)
    version = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    findings.expect_at_least("torch", version, _LEAST_TORCH)
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        findings.figure("capability", f"{found.major}.{found.minor}")
        findings.figure("multiprocessors", found.multi_processor_count)
        findings.figure("NCCL", ".".join(map(str, torch.cuda.nccl.version())), is_telling=True)
        findings.expect("the GPU adds", float((torch.ones(1000, device="cuda") * 2).sum()), 2000.0)


def _has_gpu(findings: Findings) -> bool:
    import torch

    return findings.expect("torch sees a GPU", torch.cuda.is_available(), True)


def _device_facts(findings: Findings, description: str, memory: int) -> None:
    findings.figure("device", description, is_telling=True)
    findings.figure("device memory", memory / 2**30, "GiB")
    findings.expect_at_least("device memory in bytes", memory, 1)


def _meminfo(name: str) -> int:
    """A figure of /proc/meminfo, in bytes."""
    found = re.search(rf"^{name}:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _cpu_model() -> str:
    found = re.search(r"model name\s*: (.*)", _text("/proc/cpuinfo"))
    return found.group(1) if found else platform.processor()


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
