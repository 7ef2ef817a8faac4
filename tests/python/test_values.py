"""Values that ranks must know before they accept: global scales of NVFP4 experts."""

from __future__ import annotations

import headrace
import ml_dtypes
import numpy as np
import pytest

EXPERTS = 2
PREFIX = "layers.0.ffn.experts."
CONSTANT = "model.layers.0.ffn.experts.l2_activation_scale"
CONFIG = {
    "model_type": "deepseek_v41",
    "text_config": {
        "num_hidden_layers": 1,
        "num_experts_per_tok": 1,
        "n_shared_experts": 1,
        "num_attention_heads": 2,
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 32,
        "o_groups": 1,
        "index_n_heads": 1,
        "index_head_dim": 32,
        "hc_mult": 2,
        "vocab_size": 64,
        "compress_ratios": [0],
        "kv_source_layer_ids": [],
        "index_source_layer_ids": [],
        "hidden_size": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": EXPERTS,
    },
    "quantization_config": {"weight_block_size": [32, 32], "expert_dtype": "fp4", "moe_quant_algo": "NVFP4"},
}
DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}


@pytest.fixture
def layout():
    return headrace.Layout.build(config=CONFIG)


def start(layout, job, **hooks):
    live = {spec.name: np.zeros(spec.shape, DTYPES[spec.dtype]) for spec in layout.storages if spec.alias_of is None}
    return headrace.Receiver(headrace.StorageTable.from_tensors(live), layout, job=job, hooks=headrace.Hooks(**hooks))


def weights(layout, greatest=0.75):
    tensors = {}
    for tensor in layout.tensors:
        tensors[tensor.name] = np.ones(tensor.shape, DTYPES[tensor.dtype])
        if tensor.name.endswith("input_scale"):
            tensors[tensor.name] = np.float32(greatest if tensor.name == PREFIX + "1.w2.input_scale" else 0.25)
    return tensors


class WithMetadata:
    def __init__(self, tensors, wants_value):
        self.tensors = tensors
        self.metadata = []
        for name, tensor in tensors.items():
            value = (None, tensor) if wants_value(name) else ()
            self.metadata.append((name, tensor.dtype, tensor.shape, *value))

    def __iter__(self):
        return iter(self.tensors.items())


@pytest.mark.parametrize("form", ["mapping", "callable", "metadata"])
def test_values_are_told_from_every_form_of_source(job, layout, form):
    given = weights(layout)
    with start(layout, job) as receiver, headrace.Sender.connect(job=job) as sender:
        assert sender.wants_value(PREFIX + "1.w2.input_scale")
        assert not sender.wants_value(PREFIX + "1.w2.weight")
        source = {"mapping": given, "callable": lambda: iter(given.items()), "metadata": WithMetadata(given, sender.wants_value)}[form]
        assert sender.send("run/1", source).proven
        assert receiver.serving_version() == "run/1"


def test_a_changed_launch_constant_is_refused_until_graphs_are_captured_again(job, layout):
    with start(layout, job) as receiver, headrace.Sender.connect(job=job) as sender:
        sender.send("run/1", weights(layout))
        with pytest.raises(headrace.InvalidArgument, match=rf"launch constant {CONSTANT}.*expected 0.75, got 0.5"):
            sender.send("run/2", weights(layout, 0.5))
        assert receiver.serving_version() == "run/1"
        receiver.notify("recapture")
        sender.send("run/2", weights(layout, 0.5))
        assert receiver.serving_version() == "run/2"


def test_the_engine_says_what_its_graphs_have(job, layout):
    said = {CONSTANT: np.float32(0.5)}
    with start(layout, job, launch_constants=lambda: said), headrace.Sender.connect(job=job) as sender:
        with pytest.raises(headrace.InvalidArgument, match="expected 0.5, got 0.75"):
            sender.send("run/1", weights(layout))
        sender.send("run/1", weights(layout, 0.5))
        said["other"] = 1
        with pytest.raises(headrace.Error, match="other is none of the 1 launch constants"):
            sender.send("run/2", weights(layout, 0.5))


def test_a_source_with_metadata_alone_is_told_which_values_it_lacks(job, layout):
    given = weights(layout)
    with start(layout, job), headrace.Sender.connect(job=job) as sender:
        with pytest.raises(headrace.InvalidArgument, match=rf"value was not given: .*{PREFIX}0.w1.weight_scale_2"):
            sender.send("run/1", WithMetadata(given, lambda name: False))
        wrong = WithMetadata(given, sender.wants_value)
        at = next(i for i, item in enumerate(wrong.metadata) if len(item) == 5)
        wrong.metadata[at] = (*wrong.metadata[at][:4], np.zeros(3, np.float32))
        with pytest.raises(headrace.InvalidArgument, match=r"its value is F32 of shape \[3\], its entry F32 of shape \[\]"):
            sender.send("run/1", wrong)
