"""Import layering: files import only from lower layers, or from files listed before them."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# From the lowest layer up. Within a layer, a file may import from the files listed before it.
LAYERS: list[list[str]] = [
    [
        "megatron.installation",
        "megatron.core.log",
        "megatron.core.options",
        "megatron.core.help_format",
        "megatron.core.parts",
        "megatron.core.dtypes",
        "megatron.core.autocast",
        "megatron.core.products",
        "megatron.core.dtensors",
        "megatron.core.rank_waits",
        "megatron.core.files",
        "megatron.core.shared_file",
        "megatron.core.json_reading",
        "megatron.core.nccl",
        "megatron.core.process_groups",
        "megatron.core.drivers",
        "megatron.core.trace_file",
        "megatron.core.spans",
        "megatron.core.lanes",
        "megatron.core.issuing_lane",
        "megatron.core.numa",
        "megatron.core.cgroups",
        "megatron.core.device",
        "megatron.core.issued_collectives",
        "megatron.core.local_ranks",
        "megatron.core.host_memory",
        "megatron.core.timeline",
        "megatron.core.lane_timings",
        "megatron.core.host_stack",
        "megatron.core.activation_offload",
        "megatron.core.mesh",
        "megatron.core.fp32_module",
        "megatron.core.transformer.spec",
        "megatron.core.transformer.layer_pattern",
        "megatron.core.transformer.moe_config",
        "megatron.core.transformer.rotary_config",
        "megatron.core.transformer.latent_config",
        "megatron.core.transformer.config",
        "megatron.core.transformer.layer_specs",
        "megatron.core.transformer.fused_weight",
        "megatron.core.transformer.norms",
        "megatron.core.transformer.rotary",
        "megatron.core.transformer.documents",
        "megatron.core.transformer.linear_cross_entropy",
        "megatron.core.materialize",
        "megatron.core.transformer.varlen_attention",
        "megatron.core.transformer.attention_core",
        "megatron.core.transformer.attention",
        "megatron.core.transformer.latent_attention",
        "megatron.core.transformer.causal_conv",
        "megatron.core.transformer.delta_rule_segment",
        "megatron.core.transformer.delta_rule",
        "megatron.core.transformer.gated_delta_net",
        "megatron.core.transformer.mlp",
        "megatron.core.transformer.router",
        "megatron.core.transformer.grouped_matmul",
        "megatron.core.transformer.experts",
        "megatron.core.transformer.token_permutation",
        "megatron.core.transformer.moe_layer",
        "megatron.core.transformer.layer",
        "megatron.core.transformer.expert_bias",
        "megatron.core.models.gpt.flops",
        "megatron.core.models.gpt.activations",
        "megatron.core.models.gpt.output_layer",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.compiled_layers",
        "megatron.core.layer_execution",
        "megatron.core.models.multimodal.vision_config",
        "megatron.core.models.multimodal.patch_grid",
        "megatron.core.models.multimodal.vision_tower",
        "megatron.core.models.multimodal.vision_language_model",
        "megatron.core.models.description",
        "megatron.core.models.families.row_map",
        "megatron.core.models.families.config_file",
        "megatron.core.models.families.quantization",
        "megatron.core.models.families.fields",
        "megatron.core.models.families.layer_fields",
        "megatron.core.models.families.moe_fields",
        "megatron.core.models.families.rope",
        "megatron.core.models.families.latent_fields",
        "megatron.core.models.families.table",
        "megatron.core.models.families.llama",
        "megatron.core.models.families.qwen",
        "megatron.core.models.families.qwen_moe",
        "megatron.core.models.families.olmo",
        "megatron.core.models.families.deepseek",
        "megatron.core.models.families.glm",
        "megatron.core.models.families.gpt_oss",
        "megatron.core.models.families.gemma",
        "megatron.core.models.families.smollm",
        "megatron.core.models.families.stablelm",
        "megatron.core.models.families.starcoder",
        "megatron.core.models.families.spec_differences",
        "megatron.core.models.families.config_json",
        "megatron.core.models.families.vision",
        "megatron.core.models.hugging_face",
        "megatron.core.datasets.sample_dataset",
        "megatron.core.datasets.permutation",
        "megatron.core.datasets.data_files",
        "megatron.core.datasets.index_format",
        "megatron.core.datasets.indexed_dataset",
        "megatron.core.datasets.document_boundaries",
        "megatron.core.datasets.config",
        "megatron.core.datasets.sample_index",
        "megatron.core.datasets.gpt_dataset",
        "megatron.core.datasets.mock_dataset",
        "megatron.core.datasets.blended_dataset",
        "megatron.core.datasets.packing",
        "megatron.core.datasets.answer_dataset",
        "megatron.core.datasets.image_text_files",
        "megatron.core.datasets.image_text_dataset",
        "megatron.core.datasets.builder",
        "megatron.core.datasets.sampler",
    ],
    [
        "megatron.core.distributed.config",
        "megatron.core.distributed.units",
        "megatron.core.distributed.fsdp.placement",
        "megatron.core.distributed.fsdp.policy",
        "megatron.core.distributed.fsdp.layout",
        "megatron.core.distributed.fsdp.group_memory",
        "megatron.core.distributed.fsdp.uneven_shard",
    ],
    [
        "megatron.core.distributed.fsdp.collectives",
        "megatron.core.distributed.fsdp.collective_history",
        "megatron.core.distributed.fsdp.uneven_rows",
        "megatron.core.distributed.fsdp.uneven_views",
        "megatron.core.distributed.fsdp.uneven_elementwise",
        "megatron.core.distributed.fsdp.uneven_operators",
        "megatron.core.distributed.fsdp.uneven_dtensor",
        "megatron.core.distributed.fsdp.aliases",
        "megatron.core.distributed.fsdp.replica",
        "megatron.core.distributed.fsdp.dbuffer",
        "megatron.core.distributed.fsdp.weight_buffers",
    ],
    [
        "megatron.core.distributed.fsdp.gradients",
        "megatron.core.distributed.fsdp.delivery",
        "megatron.core.distributed.fsdp.parameters",
        "megatron.core.distributed.fsdp.parameter_group",
    ],
    [
        "megatron.core.distributed.fsdp.optimizer_hooks",
        "megatron.core.distributed.fsdp.context",
        "megatron.core.distributed.fsdp.nested_tensors",
        "megatron.core.distributed.fsdp.fsdp2_arguments",
        "megatron.core.distributed.fsdp.fsdp2_methods",
        "megatron.core.distributed.fsdp.module",
        "megatron.core.distributed.fsdp.parameter_grouping",
        "megatron.core.distributed.fsdp.fully_shard",
        "megatron.core.distributed.experts",
        "megatron.core.distributed.megatron_fsdp",
        "megatron.core.distributed.planned_groups",
        "megatron.core.distributed.torch_fsdp2",
    ],
    [
        "megatron.core.optimizer.config",
        "megatron.core.optimizer.host_preflight",
        "megatron.core.optimizer.kernels.adam",
        "megatron.core.optimizer.kernels.torch_adam",
        "megatron.core.optimizer.kernels.host_adam",
        "megatron.core.optimizer.kernels.host_threads",
        "megatron.core.optimizer.kernels.device_adam",
        "megatron.core.optimizer.lr_schedule",
        "megatron.core.optimizer.clip_grads",
        "megatron.core.optimizer.scaled_states",
        "megatron.core.optimizer.step_holds",
        "megatron.core.optimizer.step_inputs",
        "megatron.core.optimizer.state_tensors",
        "megatron.core.optimizer.adam_updates",
        "megatron.core.optimizer.state_loading",
        "megatron.core.optimizer.state_units",
        "megatron.core.optimizer.adam_states",
        "megatron.core.optimizer.fused_adam",
        "megatron.core.optimizer.torch_optimizer",
        "megatron.core.optimizer.cpu_offloading.plan",
        "megatron.core.optimizer.cpu_offloading.hybrid_settings",
        "megatron.core.optimizer.cpu_offloading.bucket",
        "megatron.core.optimizer.cpu_offloading.fsdp_bucket",
        "megatron.core.optimizer.cpu_offloading.tensor_bucket",
        "megatron.core.optimizer.cpu_offloading.groups",
        "megatron.core.optimizer.cpu_offloading.host_layout",
        "megatron.core.optimizer.cpu_offloading.host_allocator",
        "megatron.core.optimizer.cpu_offloading.sub_optimizers",
        "megatron.core.optimizer.cpu_offloading.bucket_optimizers",
        "megatron.core.optimizer.cpu_offloading.device_side",
        "megatron.core.optimizer.cpu_offloading.host_side",
        "megatron.core.optimizer.cpu_offloading.both_sides",
        "megatron.core.optimizer.cpu_offloading.hybrid_optimizer",
        "megatron.core.optimizer.state_memory",
        "megatron.core.optimizer.loss_scaler",
        "megatron.core.optimizer.distrib_optimizer",
        "megatron.core.optimizer.planned_memory",
    ],
    [
        "megatron.core.dist_checkpointing.config",
        "megatron.core.dist_checkpointing.errors",
        "megatron.core.dist_checkpointing.format.names",
        "megatron.core.dist_checkpointing.agreement",
        "megatron.core.dist_checkpointing.layout.boxes",
        "megatron.core.dist_checkpointing.layout.saved",
        "megatron.core.dist_checkpointing.layout.coverage",
        "megatron.core.dist_checkpointing.format.json_members",
        "megatron.core.dist_checkpointing.format.manifest",
        "megatron.core.dist_checkpointing.format.blob",
        "megatron.core.dist_checkpointing.format.index",
        "megatron.core.dist_checkpointing.format.metadata",
        "megatron.core.dist_checkpointing.format.blob_reading",
        "megatron.core.dist_checkpointing.format.metadata_reading",
        "megatron.core.dist_checkpointing.save.data_sink",
        "megatron.core.dist_checkpointing.load.data_source",
        "megatron.core.dist_checkpointing.state.tensor_bytes",
        "megatron.core.dist_checkpointing.store",
        "megatron.core.dist_checkpointing.save.export",
        "megatron.core.dist_checkpointing.save.data_file",
        "megatron.core.dist_checkpointing.load.small_files",
        "megatron.core.dist_checkpointing.dcp.dcp_checkpoint",
        "megatron.core.dist_checkpointing.load.chunk_data",
        "megatron.core.dist_checkpointing.load.checkpoint",
        "megatron.core.dist_checkpointing.layout.holdings",
        "megatron.core.dist_checkpointing.state.dcp_hooks",
        "megatron.core.dist_checkpointing.state.dcp_state",
        "megatron.core.dist_checkpointing.dcp.torch_dcp",
        "megatron.core.dist_checkpointing.layout.file_layout",
        "megatron.core.dist_checkpointing.state.entries",
        "megatron.core.dist_checkpointing.state.param_groups",
        "megatron.core.dist_checkpointing.state.collect",
        "megatron.core.dist_checkpointing.formats",
        "megatron.core.dist_checkpointing.load.reader",
        "megatron.core.dist_checkpointing.save.writer",
        "megatron.core.dist_checkpointing.save.publisher",
        "megatron.core.dist_checkpointing.save.manager",
        "megatron.core.dist_checkpointing.dcp.plain_dcp",
        "megatron.core.dist_checkpointing.fsdp_checkpoint",
    ],
    [
        "megatron.training.health.phases",
        "megatron.training.health.jsonl",
        "megatron.training.health.events",
        "megatron.training.health.earlier_starts",
        "megatron.training.health.exits",
        "megatron.training.health.interrupts",
        "megatron.training.tokenizer",
        "megatron.training.conversations",
        "megatron.training.chat_program",
        "megatron.training.chat_template",
        "megatron.training.conversation_tokenizer",
        "megatron.training.images",
        "megatron.training.stop",
        "megatron.training.rng",
        "megatron.training.launch",
        "megatron.training.health.cause",
        "megatron.training.health.member",
        "megatron.training.health.rank_store",
        "megatron.training.health.roll_call",
        "megatron.training.health.signals",
        "megatron.training.health.progress",
        "megatron.training.health.reports",
        "megatron.training.health.watchdog",
        "megatron.training.model_loss",
        "megatron.training.step",
        "megatron.training.health.inject",
        "megatron.training.checkpoint.run_info",
        "megatron.training.expert_load",
        "megatron.training.log_lines",
        "megatron.training.lane_profile",
        "megatron.training.progress_bar",
        "megatron.training.metrics",
        "megatron.training.checkpoint.run_state",
        "megatron.training.checkpoint.hf_layout",
        "megatron.training.engine",
        "megatron.training.checkpoint.load_extras",
        "megatron.training.checkpoint.loading",
        "megatron.training.checkpoint.safetensors_files",
        "megatron.training.checkpoint.hf_files",
        "megatron.training.checkpoint.hf_config",
        "megatron.training.checkpoint.hf_export",
        "megatron.training.checkpoint.hf_weights",
        "megatron.training.engines",
        "megatron.training.config",
        "megatron.training.settings_file",
        "megatron.training.checkpoint.dcp_key_map",
        "megatron.training.checkpoint.dcp_sources",
        "megatron.training.checkpoint.dcp_import",
        "megatron.training.checkpoint.resume",
        "megatron.training.checkpoint.saver",
        "megatron.training.decision",
        "megatron.training.loop",
        "megatron.training.flag_answers",
        "megatron.training.flag_report",
    ],
    ["megatron.training.flag_help", "megatron.training.arguments", "megatron.training.pretrain"],
]
ORDER = {
    module: (layer, position)
    for layer, names in enumerate(LAYERS)
    for position, module in enumerate(names)
}


def project_files() -> dict[str, Path]:
    """Every module of the project that holds code; a package's `__init__` may hold a docstring
    only.
    """
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "megatron").rglob("*.py")
        if path.name != "__init__.py"
    }


def project_imports(tree: ast.AST) -> list[str]:
    """The project's modules that a file imports, wherever in the file."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            found += [
                f"{module}.{alias.name}" if f"{module}.{alias.name}" in ORDER else module
                for alias in node.names
            ]
    return [name for name in found if name.split(".")[0] == "megatron"]


def forbidden_imports(module: str, tree: ast.AST) -> list[str]:
    """Imports of `module` from files listed after it, in its layer or above."""
    return [name for name in project_imports(tree) if ORDER[name] >= ORDER[module]]


def test_every_file_is_in_the_list():
    assert set(project_files()) == set(ORDER)


def test_files_import_only_from_files_listed_before_them():
    for module, path in project_files().items():
        assert forbidden_imports(module, ast.parse(path.read_text())) == [], module


def test_an_import_from_a_higher_layer_would_be_found():
    tree = ast.parse("def f():\n    from megatron.training.loop import Loop\n")
    assert forbidden_imports("megatron.core.log", tree) == ["megatron.training.loop"]


# The packages whose users import from the package itself.
PUBLIC_PACKAGES = {
    "megatron.core.distributed.fsdp",
    "megatron.core.optimizer",
    "megatron.core.optimizer.cpu_offloading",
}
# Those that look for another project's files before anything else is imported.
GUARDS = {"megatron", "megatron.training"}
GUARD = "from megatron.installation import check_installation\n\ncheck_installation()"


def test_packages_have_no_code_but_the_names_that_they_export():
    for path in (ROOT / "megatron").rglob("__init__.py"):
        docstring, *rest = ast.parse(path.read_text()).body
        assert isinstance(docstring, ast.Expr), path
        package = ".".join(path.parent.relative_to(ROOT).parts)
        if package in PUBLIC_PACKAGES:
            *imports, names = rest
            assert all(isinstance(statement, ast.ImportFrom) for statement in imports)
            assert all(
                name.startswith(package) for name in project_imports(ast.Module(imports, []))
            )
            assert isinstance(names, ast.Assign), "of __all__"
        elif package in GUARDS:
            assert ast.unparse(ast.Module(rest, [])) == ast.unparse(ast.parse(GUARD)), path
        else:
            assert not rest, path


def test_no_project_import_is_inside_a_function():
    for module, path in project_files().items():
        functions = [
            node
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert not [name for function in functions for name in project_imports(function)], module


def test_only_drivers_py_names_cuda():
    naming = [module for module, path in project_files().items() if "cuda" in path.read_text()]
    assert naming == ["megatron.core.drivers"]
