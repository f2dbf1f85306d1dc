"""Which data-parallel engine runs, and how."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import check_options, expect, option


@dataclass(frozen=True)
class DataParallelConfig:
    """The data-parallel engine's settings."""

    use_torch_fsdp2: bool = option(
        True, "shard with PyTorch FSDP2; without it the model is not sharded and runs in one process, in fp32"
    )
    torch_fsdp2_reshard_after_forward: bool = option(
        True,
        "free a layer's full weights after its forward and gather them again for its backward",
        off_flag="--torch-fsdp2-no-reshard-after-forward",
    )
    distributed_timeout_minutes: float = option(10.0, "how long a collective may take before the run ends", more_than=0)

    def __post_init__(self) -> None:
        check_options(self)
        expect(
            self.torch_fsdp2_reshard_after_forward or self.use_torch_fsdp2,
            "--torch-fsdp2-no-reshard-after-forward",
            "--use-torch-fsdp2",
            "--no-use-torch-fsdp2",
        )
