"""Values that ranks must know before they accept: global scales of NVFP4 experts, and what comes under two names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

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


def tied_table():
    """Storages of two names in one memory, and one of its own."""
    shared = np.zeros((3, 4), np.float32)
    tensors = {"embed": shared, "head": shared, "norm": np.zeros(4, np.float32)}
    return shared, headrace.StorageTable.from_tensors(tensors)


ONE, OTHER = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 4), np.float32)
NORM = np.full(4, 7, np.float32)


@pytest.mark.parametrize("form", ["mapping", "callable", "metadata"])
def test_a_tied_tensor_may_come_under_one_name_or_as_the_same_under_both(job, form):
    shared, table = tied_table()
    with headrace.Receiver(table, job=job) as receiver, headrace.Sender.connect(job=job) as sender:
        assert sender.wants_value("embed") and sender.wants_value("head") and not sender.wants_value("norm")

        def source(given):
            return {"mapping": given, "callable": lambda: iter(given.items()), "metadata": WithMetadata(given, sender.wants_value)}[form]

        assert sender.send("run/1", source({"embed": OTHER, "norm": NORM})).proven
        assert (shared == OTHER).all()
        for version in ("run/2", "run/3"):
            report = sender.send(version, source({"head": ONE.copy(), "norm": NORM, "embed": ONE}))
            assert report.proven and report.ignored_names == ("head",)
            assert (shared == ONE).all() and report.wire_bytes == ONE.nbytes + NORM.nbytes
        # What differs is refused before its first byte.
        with pytest.raises(
            headrace.InvalidArgument, match="head: not what embed holds, and the engine keeps one tensor for both"
        ) as raised:
            sender.send("run/4", source({"embed": ONE, "norm": NORM, "head": OTHER}))
        assert raised.value.name == "head" and raised.value.expected != raised.value.actual
        assert (shared == ONE).all() and receiver.serving_version() == "run/3"


def test_one_bit_of_a_tied_tensor_and_another_shape_or_dtype_are_differences(job):
    shared, table = tied_table()
    flipped = ONE.copy()
    flipped.view(np.uint32)[2, 3] ^= 1
    with headrace.Receiver(table, job=job), headrace.Sender.connect(job=job) as sender:
        for other in (flipped, ONE.reshape(4, 3), ONE.view(np.int32)):
            with pytest.raises(headrace.InvalidArgument, match="head: not what embed holds"):
                sender.send("run/1", {"embed": ONE, "norm": NORM, "head": other})
        assert not shared.any()
        strided = np.asfortranarray(ONE)
        assert sender.send("run/1", {"embed": strided, "norm": NORM, "head": ONE}).proven, "equal, although it lies otherwise"


@pytest.mark.parametrize("head", [ONE, OTHER])
def test_tied_names_of_two_trainers_are_compared_too(job, head):
    shared, table = tied_table()
    names = ["a", "b"]
    with headrace.Receiver(table, job=job) as receiver:
        senders = [headrace.Sender.connect(job=job, sender=name) for name in names]
        shares = [{"embed": ONE, "norm": NORM}, {"head": head}]
        with ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(s.send, "run/1", share, senders=names) for s, share in zip(senders, shares, strict=True)]
            failures = [future.exception(60) for future in sent]
        for sender in senders:
            sender.close()
        if head is ONE:
            assert failures == [None, None] and (shared == ONE).all() and receiver.serving_version() == "run/1"
        else:
            assert all("head: not what embed holds" in str(failure) for failure in failures) and not shared.any()


def test_tied_names_of_the_plain_call_are_compared_before_a_call_writes(job):
    shared, table = tied_table()
    with headrace.Receiver(table, job=job) as receiver:
        with pytest.raises(headrace.InvalidArgument, match="head: not what embed holds"):
            with receiver.update("run/1") as update:
                update.load({"embed": ONE, "norm": NORM, "head": OTHER})
        assert not shared.any() and receiver.status().state == "idle"
        with pytest.raises(headrace.InvalidArgument, match="not what .* holds"):
            with receiver.update("run/1") as update:
                update.load({"head": OTHER})
                update.load({"embed": ONE, "norm": NORM})
        with receiver.update("run/1") as update:
            update.load({"head": ONE})
            update.load({"embed": ONE, "norm": NORM})
        assert (shared == ONE).all() and update.receipt.proven


def test_a_source_that_tells_another_tied_tensor_than_it_sends_is_found_out(job):
    shared, table = tied_table()
    given = {"embed": ONE, "norm": NORM, "head": ONE}
    with headrace.Receiver(table, job=job) as receiver, headrace.Sender.connect(job=job) as sender:
        source = WithMetadata(given, sender.wants_value)
        source.tensors = {**given, "embed": OTHER}
        with pytest.raises(headrace.Corruption, match="embed: MANIFEST said"):
            sender.send("run/1", source)
        assert receiver.serving_version() is None


def send_together(job, shares, **options):
    """From a sender each, all at once; what each of them raised."""
    names = [f"trainer-{i}" for i in range(len(shares))]
    senders = [headrace.Sender.connect(job=job, sender=name) for name in names]
    with ThreadPoolExecutor(len(shares)) as pool:
        sent = [pool.submit(s.send, "run/1", share, senders=names, **options) for s, share in zip(senders, shares, strict=True)]
        failures = [future.exception(60) for future in sent]
    for sender in senders:
        sender.close()
    return failures


def test_one_of_two_trainers_that_brings_a_tied_tensor_under_one_name_is_believed(job):
    shared, table = tied_table()
    with headrace.Receiver(table, job=job) as receiver:
        assert send_together(job, [{"embed": ONE}, {"norm": NORM}]) == [None, None]
        assert (shared == ONE).all() and receiver.serving_version() == "run/1"


def test_a_tied_tensor_of_two_trainers_that_both_bring_it_under_one_name_is_compared_with_nothing(job):
    shared, table = tied_table()
    without_value = WithMetadata({"embed": ONE}, lambda name: False)
    with headrace.Receiver(table, job=job):
        assert send_together(job, [{"embed": ONE, "norm": NORM}, without_value], overlap="first_sender_owns") == [None, None]
        assert (shared == ONE).all()


def test_an_engine_that_keeps_both_names_is_sent_what_another_is_told_of_its_tie(job):
    shared, table = tied_table()
    own = {name: np.zeros((3, 4), np.float32) for name in ("embed", "head")} | {"norm": np.zeros(4, np.float32)}
    with (
        headrace.Receiver(table, job=job, engine="tied"),
        headrace.Receiver(headrace.StorageTable.from_tensors(own), job=job, engine="apart"),
        headrace.Sender.connect(job=job) as sender,
    ):
        assert sender.send("run/1", {"embed": ONE, "norm": NORM, "head": ONE}).proven
        assert (shared == ONE).all() and (own["embed"] == ONE).all() and (own["head"] == ONE).all()


def test_a_tied_tensor_in_parts_may_come_under_one_name_only(job):
    shared, table = tied_table()
    parts = [headrace.Part(ONE[i : i + n], ONE.shape, ([i, 0], [i + n, 4])) for i, n in ((0, 1), (1, 2))]
    with headrace.Receiver(table, job=job):
        with headrace.Sender.connect(job=job) as sender:
            with pytest.raises(
                headrace.InvalidArgument, match="the value of embed: it is wanted of the whole tensor, this sender has a part"
            ):
                sender.send("run/1", {"embed": parts[0], "head": ONE, "norm": NORM})
        shares = [{"embed": parts[0], "norm": NORM}, {"embed": parts[1]}]
        for failure in send_together(job, [*shares, {"head": ONE}]):
            assert "embed: sender trainer-0 has a part of it, and it comes under another name too" in str(failure)
        assert not shared.any()
        assert send_together(job, shares) == [None, None] and (shared == ONE).all()
