from __future__ import annotations

import json

import headrace
import ml_dtypes
import numpy as np
import pytest

HIDDEN, INTER, EXPERTS = 256, 128, 4


def moe_config() -> dict:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INTER,
        "intermediate_size": INTER,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }


def moe_tensors() -> list[tuple[str, str, tuple[int, ...]]]:
    shapes = {"gate_proj": (INTER, HIDDEN), "up_proj": (INTER, HIDDEN), "down_proj": (HIDDEN, INTER)}
    return [(f"model.layers.0.mlp.experts.{e}.{part}.weight", "BF16", shape) for e in range(EXPERTS) for part, shape in shapes.items()]


def storage_for(layout: headrace.Layout) -> dict[str, np.ndarray]:
    dtypes = {"BF16": ml_dtypes.bfloat16, "F32": np.float32, "U8": np.uint8}
    return {spec.name: np.zeros(spec.shape, dtypes[spec.dtype]) for spec in layout.storages if spec.alias_of is None}


def test_dense_layouts_come_from_listed_tensors(tmp_path):
    listed = [("model.norm.weight", "F32", (8,)), ("model.embed_tokens.weight", "bfloat16", (16, 8))]
    layout = headrace.Layout.build(family="dense", tensors=listed)
    assert {(t.name, t.dtype, t.shape) for t in layout.tensors} == {
        ("model.norm.weight", "F32", (8,)),
        ("model.embed_tokens.weight", "BF16", (16, 8)),
    }
    live = storage_for(layout)
    table = headrace.StorageTable.from_tensors(live)
    given = {"model.norm.weight": np.arange(8, dtype=np.float32), "model.embed_tokens.weight": np.ones((16, 8), ml_dtypes.bfloat16)}
    assert layout.place(table, given.items()) == 32 + 256
    for tensor in layout.tensors:
        assert live[tensor.storages[0]].tobytes() == given[tensor.name].tobytes()


def test_experts_are_spelled_out_and_placed_where_fused_layers_have_them(tmp_path):
    config = moe_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    layouts = [
        headrace.Layout.build(config=given, family="fused_moe", tensors=moe_tensors()) for given in (config, tmp_path, str(tmp_path))
    ]
    layout = layouts[0]
    assert layout.storages == layouts[1].storages == layouts[2].storages
    names = [tensor.name for tensor in layout.tensors]
    assert sorted(names) == sorted(name for name, _, _ in moe_tensors())
    live = storage_for(layout)
    table = headrace.StorageTable.from_tensors(live)
    rng = np.random.default_rng(5)
    given = {name: rng.random(shape).astype(ml_dtypes.bfloat16) for name, _, shape in moe_tensors()}
    layout.place(table, given.items())
    w13 = next(array for name, array in live.items() if name.endswith("w13_weight"))
    w2 = next(array for name, array in live.items() if name.endswith("w2_weight"))
    for expert in range(EXPERTS):
        part = {p: given[f"model.layers.0.mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down")}
        assert w13[expert].tobytes() == np.concatenate([part["gate"], part["up"]]).tobytes()
        assert w2[expert].tobytes() == part["down"].tobytes()


def test_a_share_of_experts_belongs_to_each_rank():
    halves = [
        headrace.Layout.build(config=moe_config(), family="fused_moe", layout="ep2", rank=rank, tensors=moe_tensors()) for rank in (0, 1)
    ]
    names = [{tensor.name for tensor in half.tensors} for half in halves]
    assert names[0] | names[1] == {name for name, _, _ in moe_tensors()}
    assert not names[0] & names[1]


def test_what_a_family_has_not_is_refused():
    with pytest.raises(headrace.Unsupported, match="variant"):
        headrace.Layout.build(config=moe_config(), family="fused_moe", variant="nonsense", tensors=moe_tensors())
    with pytest.raises(headrace.InvalidArgument, match="layout"):
        headrace.Layout.build(config=moe_config(), layout="xp3")
    with pytest.raises(headrace.InvalidArgument, match="dtype"):
        headrace.Layout.build(family="dense", tensors=[("a", "F33", (1,))])


def test_a_renamed_layout_writes_to_storages_of_the_other_name():
    layout = headrace.Layout.build(family="dense", tensors=[("a.weight", "F32", (4,))])
    ours = layout.storages[0].name
    renamed = layout.renamed({ours: "theirs"})
    live = np.zeros(4, np.float32)
    table = headrace.StorageTable.from_tensors({"theirs": live})
    renamed.place(table, [("a.weight", np.arange(4, dtype=np.float32))])
    assert live.tolist() == [0, 1, 2, 3]
    with pytest.raises(headrace.InvalidArgument, match="nothing"):
        layout.renamed({"nothing": "x"})


def test_only_some_storages_leave_only_what_lands_there():
    layout = headrace.Layout.build(family="dense", tensors=[(f"{n}.weight", "F32", (4,)) for n in "abc"])
    kept = [spec.name for spec in layout.storages][1:]
    less = layout.only(kept)
    assert [spec.name for spec in less.storages] == kept
    assert [tensor.name for tensor in less.tensors] == [t.name for t in layout.tensors if t.storages[0] in kept]
    with pytest.raises(headrace.InvalidArgument, match="nothing"):
        layout.only(["nothing"])


def test_place_refuses_before_the_first_byte():
    live = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}
    table = headrace.StorageTable.from_tensors(live)
    layout = headrace.Layout.identity(table)
    ones = np.ones(4, np.float32)
    for wrong in (
        [("a", ones), ("b", np.ones(5, np.float32))],
        [("a", ones), ("b", ones.astype(np.float64))],
        [("a", ones), ("c", ones)],
        [("a", ones), ("a", ones)],
    ):
        with pytest.raises(headrace.InvalidArgument):
            layout.place(table, wrong)
    assert not live["a"].any()
    assert layout.place(table, []) == 0


def test_groups_are_described_and_checked():
    layout = headrace.Layout.build(family="dense", tensors=[("a.weight", "F32", (4,))])
    group = headrace.Group("pair", entries=[("q", "F32", (2, 2)), ("s", "U8", (3,))], outputs=[headrace.StorageSpec("out", "U8", (5,))])
    grouped = layout.with_groups([group])
    assert grouped.group_shapes == {"pair": ([("q", "F32", (2, 2)), ("s", "U8", (3,))], [("out", "U8", (5,))])}
    assert grouped.storages[-1].bytes == 5
    assert {t.name: t.group for t in grouped.tensors} == {"a.weight": None, "q": "pair", "s": "pair"}
    assert layout.group_shapes == {}
    with pytest.raises(headrace.InvalidArgument, match="missing"):
        layout.with_groups([headrace.Group("pair", entries=[("q", "F32", (2,))], outputs=["missing"])])
    with pytest.raises(headrace.InvalidArgument, match="has a rule already"):
        layout.with_groups([headrace.Group("pair", entries=[("a.weight", "F32", (4,))], outputs=[layout.storages[0].name])])


def test_dropped_names_may_come_and_are_left_aside():
    table = headrace.StorageTable.from_tensors({"a": np.zeros(4, np.float32)})
    brought = {"a": np.ones(4, np.float32), "aside": np.ones(3, np.float32)}
    with (
        headrace.Receiver(table, job="dropping-not") as receiver,
        pytest.raises(headrace.Error, match="aside"),
        receiver.update("run/1") as update,
    ):
        update.load(brought)
    layout = headrace.Layout.identity(table).dropping(["aside"])
    with headrace.Receiver(table, layout, job="dropping") as receiver, receiver.update("run/1") as update:
        update.load(brought)
    assert update.receipt.tensors == 1


def moe_layer(layer: int) -> headrace.Layout:
    tensors = [(name.replace("layers.0", f"layers.{layer}"), dtype, shape) for name, dtype, shape in moe_tensors()]
    return headrace.Layout.build(config=moe_config() | {"num_hidden_layers": layer + 1}, family="fused_moe", tensors=tensors)


def test_a_tensor_of_two_joined_layouts_lands_in_both_models():
    live = {name: np.zeros(4, np.float32) for name in ("a", "b", "draft.a", "draft.c")}
    target = headrace.Layout.identity(headrace.StorageTable.from_tensors({name: live[name] for name in ("a", "b")}))
    draft = headrace.Layout.identity(headrace.StorageTable.from_tensors({name: live[f"draft.{name}"] for name in ("a", "c")}))
    joined = target.join(draft, prefix="draft.")
    assert [spec.name for spec in joined.storages] == ["a", "b", "draft.a", "draft.c"]
    assert {t.name: t.storages for t in joined.tensors} == {"a": ("a", "draft.a"), "b": ("b",), "c": ("draft.c",)}
    given = {name: np.arange(4, dtype=np.float32) + i for i, name in enumerate("abc")}
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), joined, job="joined") as receiver:
        with receiver.update("run/1") as update:
            update.load(given)
        assert update.receipt.proven
        assert set(receiver.fingerprint()) == {"a", "b", "c"}
    assert {name: array.tobytes() == given[name[-1]].tobytes() for name, array in live.items()} == dict.fromkeys(live, True)
    with pytest.raises(headrace.InvalidArgument, match="both have a storage a"):
        target.join(draft, prefix="")
    other = headrace.Layout.identity(headrace.StorageTable.from_tensors({"a": np.zeros(5, np.float32)}))
    with pytest.raises(headrace.Unsupported, match="a: shapes"):
        target.join(other, prefix="draft.")


def test_each_of_two_joined_models_has_experts_of_its_own():
    joined = moe_layer(0).join(moe_layer(1), prefix="draft.")
    live = storage_for(joined)
    tensors = [tensor for layer in (moe_layer(0), moe_layer(1)) for tensor in layer.tensors]
    rng = np.random.default_rng(7)
    given = {tensor.name: rng.random(tensor.shape).astype(ml_dtypes.bfloat16) for tensor in tensors}
    maps = [[3, 2, 1, 0], [1, 0, 3, 2]]
    hooks = headrace.Hooks(expert_map=lambda: maps)
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), joined, job="joined-experts", hooks=hooks) as receiver:
        with receiver.update("run/1") as update:
            update.load(given)
    for layer, prefix in enumerate(("", "draft.")):
        w2 = next(array for name, array in live.items() if name.startswith(f"{prefix}model.layers.{layer}") and name.endswith("w2_weight"))
        for slot, expert in enumerate(maps[layer]):
            assert w2[slot].tobytes() == given[f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"].tobytes()
    with pytest.raises(headrace.Unsupported, match="both models have experts of this name"):
        moe_layer(0).join(moe_layer(0), prefix="draft.")


def test_only_some_storages_leave_only_their_maps_of_experts_where_that_is_asked_for():
    joined = moe_layer(0).join(moe_layer(1), prefix="draft.")
    less = joined.only([spec.name for spec in joined.storages if spec.name.startswith("draft.")], drop_maps=True)
    live = storage_for(less)
    given = {t.name: np.ones(t.shape, ml_dtypes.bfloat16) for t in less.tensors}
    assert all(name.startswith("model.layers.1.") for name in given)
    hooks = headrace.Hooks(expert_map=lambda: [[1, 0, 3, 2]])
    with headrace.Receiver(headrace.StorageTable.from_tensors(live), less, job="less-maps", hooks=hooks) as receiver:
        with receiver.update("run/1") as update:
            update.load(given)
    assert update.receipt.proven


def test_open_layouts_take_names_that_the_family_does_not_know():
    tensors = [*moe_tensors(), ("model.layers.0.enorm.weight", "BF16", (HIDDEN,))]
    with pytest.raises(headrace.Error, match="enorm"):
        headrace.Layout.build(config=moe_config(), family="fused_moe", tensors=tensors)
    layout = headrace.Layout.build(config=moe_config(), family="fused_moe", variant="plain+open", tensors=tensors)
    assert "model.layers.0.enorm.weight" in {spec.name for spec in layout.storages}
