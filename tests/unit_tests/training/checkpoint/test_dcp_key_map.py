"""Tables of --dcp-key-map, and the one for torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.layout.saved import SavedTensor
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.dcp_import import DcpView
from megatron.training.checkpoint.dcp_key_map import Heads, KeyMap
from megatron.training.checkpoint.dcp_sources import HeadOrder, Sources, find_sources

TITAN = Path(__file__).parents[4] / "examples" / "torchtitan_llama3.yaml"
FP32 = torch.float32
NO_HEADS = Heads({})


def read(tmp_path: Path, text: str, heads: Heads = NO_HEADS) -> KeyMap:
    path = tmp_path / "table.yaml"
    path.write_text(text)
    return KeyMap.read(str(path), heads)


def sources(key_map: KeyMap, **shapes: tuple[int, ...]) -> Sources:
    """The sources in a directory with such tensors."""
    tensors = {key: SavedTensor(key, FP32, sizes, []) for key, sizes in shapes.items()}
    return find_sources(tensors, key_map, "there")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the table in .*: expected a mapping"),
        ("keys: [a]", "expected a mapping"),
        ("keys: {a: b}\nprefix: x", r"got \['prefix'\]"),
        ("keys: {a: b, a: c}", "each name once, got 'a'"),
        ("keys: {a: &x {to: b}, c: *x}", "no aliases, got 'one in line 1'"),
        ("keys: {a: []}", "a in .*: expected at least one of our"),
        ("keys: {a: {from: b}}", "a in .*: expected one of our names"),
        ("keys: {a: {to: b, row: 1}}", r"got \['row'\]"),
        ("keys: {'a.{n}': 'b.{m}'}", "got .*'m'"),
        ("keys: {'a.{1}': b}", r"placeholders like \{n\}"),
        ("keys: {a: {stack: e, parts: [b]}}", "a: stack in .*: expected a placeholder"),
        ("keys: {a: {to: b, rotary: interleaved}}", "expected heads"),
        ("keys: {a: {to: b, rotary: pairs}}", "a: rotary in .*: expected halves or"),
        ("keys: {a: {to: b, heads: 0}}", "expected a number, or num_attention_heads"),
        ("keys: {a: [b, {to: c, heads: 2}]}", "heads of all parts, or of none"),
        ("keys: {a: b}\nweights: model", r"weights in .*: expected a key with \{name\}"),
        ("keys: {a: b}\nmoments: 'm.{name}'", r"key with \{name\} and \{moment\}"),
        ("keys: {a: b}\ntied: [a]", "tied in "),
        ("keys: {a: b}\nignore: x", "ignore in .*: expected a list"),
        ("keys: {a: ", "--dcp-key-map: expected YAML in"),
    ],
)
def test_an_invalid_table_is_an_error_with_the_place_and_the_reason(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize(
    ("weight", "moment"),
    [
        ("{}", "optimizer.state.{}.exp_avg"),
        ("model.{}", "optim.state.{}.exp_avg"),
        ("app.model.{}", "app.optim.state.{}.exp_avg"),
        ("model.{}", "optimizer.{}.exp_avg"),
    ],
)
def test_the_usual_places_of_weights_and_moments_are_found(tmp_path, weight, moment):
    key_map = read(tmp_path, "keys: {'l.{n}.w': 'own.{n}.weight', norm: final}")
    found = sources(
        key_map,
        **{
            weight.format("l.3.w"): (4, 2),
            weight.format("norm"): (2,),
            moment.format("l.3.w"): (4, 2),
            "lr_scheduler.last": (1,),
            "ema.norm": (2,),
        },
    )
    assert list(found.ours) == [
        "model.own.3.weight",
        "model.final",
        "optimizer.state.own.3.weight.exp_avg",
    ]
    assert [theirs.key for theirs in found.unknown] == ["ema.norm"]


def test_a_table_may_name_the_keys_of_moments(tmp_path):
    text = "keys: {w: own}\nweights: 'net/{name}'\nmoments: {exp_avg: 'm/{name}', step: 't/{name}'}"
    shapes = {"net/w": (4, 2), "m/w": (4, 2), "t/w": (1,)}
    found = sources(read(tmp_path, text), **shapes)
    assert {key: source.shape for key, source in found.ours.items()} == {
        "model.own": (4, 2),
        "optimizer.state.own.exp_avg": (4, 2),
        "optimizer.state.own.step": (),
    }
    without = read(tmp_path, "keys: {w: own}\nmoments: false\nignore: ['optim.*']")
    found = sources(without, **{"w": (4, 2), "optim.state.w.exp_avg": (4, 2)})
    assert list(found.ours) == ["model.own"]
    assert not found.unknown


def test_tensors_that_do_not_divide_and_duplicates_are_one_error(tmp_path):
    heads = Heads({"num_attention_heads": 4, "num_query_groups": 2})
    text = """
        keys:
          w13: [gate, up]
          wq: {to: query, heads: num_attention_heads, rotary: interleaved}
          old: query
          qkv:
            groups: 2
            parts: [{to: q, heads: 3}, {to: k, heads: 1}]
        """
    shapes = {"w13": (5, 2), "wq": (12, 2), "old": (12, 2), "qkv": (8, 2)}
    with pytest.raises(CheckpointError) as caught:
        sources(read(tmp_path, text, heads), **shapes)
    for clause in (
        "w13 of shape (5, 2) does not divide into 1 + 1 parts;",
        "wq of shape (12, 2) does not divide into 4 heads",  # of three rows, which make no pairs
        "qkv of shape (8, 2) does not divide into 3 + 1 heads in 2 groups",
    ):
        assert clause in str(caught.value)

    shapes = {"wq": (16, 2), "old": (16, 2)}
    with pytest.raises(CheckpointError, match=r"it has model\.query twice"):
        sources(read(tmp_path, text, heads), **shapes)


@given(
    groups=st.integers(1, 3),
    per_group=st.integers(1, 3),
    pairs=st.integers(1, 3),
    turned=st.sampled_from([1.0, 0.5]),
)
def test_rows_of_fused_and_interleaved_heads_match_reshapes(
    tmp_path_factory, groups, per_group, pairs, turned
):
    """The rows as a tensor that holds their own numbers, divided with torch."""
    head = 4 * pairs
    heads = Heads({"num_attention_heads": groups * per_group, "num_query_groups": groups}, turned)
    text = """
        keys:
          qkv:
            groups: num_query_groups
            parts:
              - {to: q, heads: num_attention_heads, rotary: interleaved}
              - {to: k, heads: num_query_groups}
              - {to: v, heads: num_query_groups}
        """
    num_rows = groups * (per_group + 2) * head
    found = sources(read(tmp_path_factory.getbasetemp(), text, heads), qkv=(num_rows, 3))

    rows = torch.arange(num_rows).view(groups, per_group + 2, head)
    queries = rows[:, :per_group].reshape(-1, head)
    num_turned = int(head * turned)
    halves = queries[:, :num_turned].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
    expected = {
        "model.q": torch.cat([halves, queries[:, num_turned:]], dim=1).flatten(),
        "model.k": rows[:, per_group].flatten(),
        "model.v": rows[:, per_group + 1].flatten(),
    }
    for key, source in found.ours.items():
        runs = source.rows.ranges(0, source.shape[0])
        got = torch.cat([torch.arange(r.start, r.start + r.own_stop - r.own_start) for r in runs])
        if source.heads is not None:
            got = got.view(-1, head)[:, source.heads.theirs()].flatten()
        assert torch.equal(got, expected[key])
        assert source.shape == (len(got), 3)


@settings(max_examples=20)
@given(data=st.data(), rows=st.integers(1, 3), is_fp32=st.booleans())
def test_any_box_of_a_tensor_is_read_like_an_index(tmp_path_factory, data, rows, is_fp32):
    """Fused, interleaved, stacked and plain tensors, through the view."""
    tmp_path = tmp_path_factory.mktemp("folder")
    text = """
        keys:
          w13: {stack: e, parts: ['gate.{e}', 'up.{e}']}
          w13.b: {stack: e, parts: ['gate.{e}.bias', 'up.{e}.bias']}
          wq: {to: query, heads: 2, rotary: interleaved}
          norm: final
        moments: false
        """
    dtype = torch.float32 if is_fp32 else torch.bfloat16
    sizes = {"w13": (3, 2 * rows, 4), "w13.b": (3, 2 * rows), "wq": (8 * rows, 3), "norm": (5,)}
    state = {key: torch.randn(shape).to(dtype) for key, shape in sizes.items()}
    dcp.save(state, checkpoint_id=str(tmp_path / "saved"), no_dist=True)
    expected = {"model.final": state["norm"]}
    expected["model.query"] = (
        state["wq"].view(2, 2 * rows, 2, 3).transpose(1, 2).reshape(8 * rows, 3)
    )
    for number in range(3):
        for suffix, key in (("", "w13"), (".bias", "w13.b")):
            halves = state[key][number].chunk(2)
            expected |= {f"model.gate.{number}{suffix}": halves[0]}
            expected |= {f"model.up.{number}{suffix}": halves[1]}

    view = DcpView.open(str(tmp_path / "saved"), read(tmp_path, text))
    assert {key: source.shape for key, source in view.sources.ours.items()} == {
        key: tuple(value.shape) for key, value in expected.items()
    }
    for key, value in expected.items():
        starts = [data.draw(st.integers(0, size - 1)) for size in value.shape]
        stops = [
            data.draw(st.integers(start + 1, size))
            for start, size in zip(starts, value.shape, strict=True)
        ]
        part = value[tuple(map(slice, starts, stops))]
        out = torch.empty(part.shape)
        view.read(key, starts, out)
        assert torch.equal(out, part.float())


def test_a_stacks_counter_counts_for_each_of_its_matrices(tmp_path):
    text = "keys: {w: {stack: e, parts: ['a.{e}', 'b.{e}']}}"
    shapes = {"w": (2, 4, 3), "optim.state.w.step": (), "optim.state.w.exp_avg": (2, 4, 3)}
    found = sources(read(tmp_path, text), **shapes).ours
    assert [key for key, source in found.items() if not source.shape] == [
        f"optimizer.state.{name}.step" for name in ("a.0", "b.0", "a.1", "b.1")
    ]
    assert found["model.b.1"].rows.start == 6
    assert found["model.b.1"].shape == (2, 3)
    with pytest.raises(
        CheckpointError, match=r"w of shape \(4,\) does not divide into 1 \+ 1 parts"
    ):
        sources(read(tmp_path, text), w=(4,))
    # Without elements, so any number of matrices fits into a file.
    with pytest.raises(CheckpointError, match=r"w of shape .* does not divide"):
        sources(read(tmp_path, text), w=(1 << 40, 0, 3))


def test_the_order_in_a_head_is_the_one_in_the_drawing():
    assert HeadOrder(6, 4).theirs().tolist() == [0, 2, 1, 3, 4, 5]


def test_rows_keep_their_order_if_our_model_is_interleaved_as_well(tmp_path):
    text = "keys: {a: {to: b, heads: 2, rotary: interleaved}}"
    assert sources(read(tmp_path, text), a=(8,)).ours["model.b"].heads == HeadOrder(4, 4)
    same = read(tmp_path, text, Heads({}, is_interleaved=True))
    assert sources(same, a=(8,)).ours["model.b"].heads is None


# The names in torchtitan for llama3, from its HF adapter and its test of state dict keys (commit
# b5bcd76c of August 2026, and v0.1.0 of 2025).
TOP = ("tok_embeddings.weight", "norm.weight")
LAYER = (
    "attention.wo.weight",
    "attention_norm.weight",
    "feed_forward.w1.weight",
    "feed_forward.w2.weight",
    "feed_forward.w3.weight",
    "ffn_norm.weight",
)
SPLIT = tuple(f"attention.qkv_linear.{name}.weight" for name in ("wq", "wk", "wv"))
FUSED = ("attention.qkv_linear.wqkv.weight",)
OLD = tuple(f"attention.{name}.weight" for name in ("wq", "wk", "wv"))


@pytest.mark.parametrize(
    ("weights", "moments", "output"),
    [
        (SPLIT, FUSED, "lm_head.weight"),
        (SPLIT, SPLIT, "lm_head.weight"),
        (OLD, OLD, "output.weight"),
    ],
    ids=["fused", "split", "of 2025"],
)
@pytest.mark.parametrize(("num_heads", "num_groups"), [(16, 16), (32, 8)])
def test_the_example_table_has_torchtitans_names(weights, moments, output, num_heads, num_groups):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=num_heads * 4,
        num_attention_heads=num_heads,
        group_query_attention=True,
        num_query_groups=num_groups,
        normalization="RMSNorm",
        swiglu=True,
        ffn_hidden_size=24,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )
    rows = {"wq": num_heads * 4, "wk": num_groups * 4, "wv": num_groups * 4}
    rows |= {"wqkv": sum(rows.values()), "w1": 24, "w3": 24}

    def shape(name: str) -> tuple[int, ...]:
        matrix = (rows.get(name.split(".")[-2], config.hidden_size), config.hidden_size)
        return matrix[:1] if "norm" in name else matrix

    def names(attention: tuple[str, ...]) -> list[str]:
        layers = [f"layers.{n}.{name}" for n in (0, 1) for name in (*LAYER, *attention)]
        return [*TOP, output, *layers]

    shapes = {name: shape(name) for name in names(weights)}
    shapes |= {f"optimizer.state.{n}.exp_avg": shape(n) for n in names(moments)}
    shapes |= {f"optimizer.state.{n}.step": () for n in names(moments)}
    shapes |= {f"optimizer.param_groups.{n}.lr": () for n in names(moments)}
    found = sources(KeyMap.read(str(TITAN), Heads.of(config)), **shapes)
    assert not found.unknown

    with torch.device("meta"):
        model = GPTModel(config, config.hidden_size)
    own = {entry.key: entry.saved_as.shape[0] for entry in collect(model).entries}
    assert {key: found.ours[key].shape[0] for key in own} == own
    states = {key.removeprefix("optimizer.state.") for key in found.ours if key not in own}
    assert states == {
        f"{key.removeprefix('model.')}.{state}" for key in own for state in ("exp_avg", "step")
    }
