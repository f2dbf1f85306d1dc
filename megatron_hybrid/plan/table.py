"""The table that a plan prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.log import counted
from megatron_hybrid.plan.answer import Answer
from megatron_hybrid.plan.quantities import shown_rate, shown_seconds, shown_size

_EXPLAINED = {
    "compute": "forward and backward",
    "host pass": "waited for the update in host memory",
    "link": "waited for copies between device and host",
    "device pass": "the update on the device",
    "interconnect": "waited for other ranks",
}


def format_answer(answer: Answer) -> str:
    """Returns paragraphs of aligned lines."""
    parts = [_header(answer), _memory(answer), _fractions(answer), _step(answer)]
    parts.append([f"a checkpoint: {shown_size(answer.checkpoint_nbytes)}"])
    return "\n\n".join("\n".join(part) for part in parts if part)


def _header(answer: Answer) -> list[str]:
    run = answer.run
    config = run.config
    precision = config.training.compute_dtype
    if precision != "fp32":
        precision += f" over {config.optimizer.main_params_dtype} main weights"
    batch = f"{config.training.micro_batch_size} x {config.data.seq_length:,} tokens"
    return [
        f"{run.numel:,} parameters, {precision}",
        f"{config.parallel.engine} on {counted(run.world_size, 'rank')}",
        f"a step: {run.tokens_per_step:,} tokens, {counted(run.num_microbatches, 'microbatch')} of "
        f"{batch} on each rank",
    ]


def _memory(answer: Answer) -> list[str]:
    memory, limits = answer.memory, answer.limits
    where = "nothing offloaded"
    if answer.fraction is not None:
        where = f"offload fraction {answer.fraction:g}"
    if answer.is_chosen:
        where += ", the smallest that fits"

    rows = [(f"memory of a rank, {where}", "device", "host")]
    rows += [(name, _size(row.device), _size(row.host)) for name, row in answer.rows.items()]
    rows.append(("in all", _size(memory.device_nbytes), _size(memory.host_nbytes)))
    if limits.device_reserve:
        rows.append(("reserve", _size(limits.device_reserve), "-"))
    if limits.device is not None or limits.host is not None:
        ranks = answer.run.world_size
        on_host = "" if limits.host is None else shown_size(limits.host / ranks)
        on_device = ""
        if limits.device is not None:
            on_device = shown_size(limits.device + limits.device_reserve)
        rows.append(("of", on_device, on_host))
    return [*_aligned(rows)]


def _fractions(answer: Answer) -> list[str]:
    limits = answer.limits
    rows = []
    if limits.device is not None or limits.host is not None:
        rows.append(("smallest offload fraction that fits", _fraction(answer.smallest_fitting)))
    if answer.machine is not None:
        rows.append(("largest one that is hidden", _fraction(answer.largest_hidden)))
        if answer.activation_fraction is not None:
            of_activations = "largest activation offload fraction that is hidden"
            rows.append((of_activations, _fraction(answer.activation_fraction)))
    return [*_aligned(rows)]


def _step(answer: Answer) -> list[str]:
    time, rate, flops = answer.time, answer.tokens_per_second, answer.flops_per_second
    if time is None or rate is None or flops is None:
        return []
    rows = [("a step", "", "")]
    rows += [
        (name, shown_seconds(seconds), _EXPLAINED[name])
        for name, seconds in time.parts.items()
        if seconds or name == "compute"
    ]
    rows.append(("in all", shown_seconds(time.seconds), f"bound by {time.bound}"))
    if answer.muon_share:
        relative = "relative to the FLOP of forward and backward, included in compute"
        rows.append(("Newton-Schulz", f"{answer.muon_share:.1%}", relative))
    if time.update_on_device:
        of_states = "of the states in host memory are updated on the device"
        rows.append(("streamed", f"{time.update_on_device:.0%}", of_states))
    if time.activations:
        copies = f"a microbatch's, each way, next to {shown_seconds(time.forward)} of forward"
        rows.append(("activations", shown_seconds(time.activations), copies))
    rows.append(("tokens/s", f"{rate:,.0f}", f"{shown_rate(flops, 'FLOP/s')} a rank"))
    return [*_aligned(rows, left=(0, 2))]


def _size(nbytes: int) -> str:
    return shown_size(nbytes) if nbytes else "-"


def _fraction(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _aligned(rows: Sequence[tuple[str, ...]], left: tuple[int, ...] = (0,)) -> Iterator[str]:
    """Yields rows with aligned columns, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:{'<' if number in left else '>'}{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
