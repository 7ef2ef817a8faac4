"""An engine worker's end and the checkpoint engine `headrace`, with real receivers and senders, through verl's own registry and wire."""

import asyncio
import inspect
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from importlib import metadata

import headrace
import pytest
import torch
import verl_cpu_platform  # noqa: F401
from headrace.integration.buckets import Bucket
from headrace.integration.verl.engine_side import Announcement, EngineSide, Verdict, dump_tensors, parse_tensors
from headrace.integration.verl.wire import BucketFan, BucketReceiver, BucketSender, BucketStream
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from weight_streams import WAIT_S, Landed, assert_same, bytes_of, mixed, new_handle, nothing_left_behind, start, wait_until

import headrace.integration.verl.backend  # isort: skip


@pytest.fixture(autouse=True)
def tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    print(f"\n{inspect.getfile(CheckpointEngineRegistry)} of verl {metadata.version('verl')}")
    # pytest's own folders are too long for a socket's path.
    with tempfile.TemporaryDirectory(prefix="hr-") as folder, nothing_left_behind():
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield


def bindable(seed: int) -> dict[str, torch.Tensor]:
    """What a model may hold as parameters: no empty tensors, all contiguous."""
    return {name: tensor.detach().contiguous() for name, tensor in mixed(seed).items() if tensor.numel()}


class Engine:
    """An engine worker without an engine: live tensors, and a bound receiver of which every storage is a tensor of its own name."""

    def __init__(self, engine: str = "replica-0", rank: int = 0, ranks: int = 1, refuse: str = "") -> None:
        self.live = {name: torch.zeros_like(tensor) for name, tensor in bindable(0).items()}
        self.where = {"engine": engine, "rank": rank, "ranks": ranks}
        self.refuse = refuse
        self.sleeps = False
        self.binds: list[str] = []
        self.copied = 0
        self.running = False
        self.side = EngineSide(self.bind, job=f"verl-test-{os.getpid()}", wait_s=WAIT_S)

    def bind(self, job: str, tensors: tuple) -> "Engine":
        self.binds.append(job)
        if self.refuse:
            raise headrace.Unsupported(self.refuse)
        table = headrace.StorageTable.from_tensors(self.live)
        self.receiver = headrace.Receiver(table, job=job, hooks=headrace.Hooks(quiescent=self.side.quiescent), **self.where)
        return self

    def open(self) -> None:
        self.running = True

    def close_session(self) -> None:
        self.running = False

    def close(self) -> None:
        self.receiver.close()

    def discards(self) -> bool:
        return self.sleeps

    def ways(self) -> dict[str, int]:
        return {"direct": len(self.live)}

    def attend_by_wire(self, handle: str) -> None:
        """What the worker extension does; tensors that nothing is bound to are copied, as an engine's own loader would."""
        self.side.receive(BucketReceiver(handle, WAIT_S), self.copy)

    def copy(self, bucket: Bucket) -> None:
        for name, tensor in bucket.tensors():
            self.live[name].copy_(tensor)
            self.copied += 1

    def holds(self, sent: dict[str, torch.Tensor]) -> bool:
        return {name: bytes_of(tensor) for name, tensor in self.live.items()} == {name: bytes_of(tensor) for name, tensor in sent.items()}


def described(named: dict[str, torch.Tensor]) -> tuple:
    """As it travels: packed FP4 as bytes."""
    names = {torch.float4_e2m1fn_x2: "uint8"}
    return tuple((name, names.get(t.dtype, str(t.dtype).removeprefix("torch.")), tuple(t.shape)) for name, t in named.items())


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    yield made
    made.side.forget()


@pytest.mark.parametrize("sender", ["stock", "ours"])
def test_buckets_of_verls_wire_are_written_in_place_three_times(sender: str, engine: Engine) -> None:
    engine.side.learn(described(engine.live))
    addresses = {name: tensor.data_ptr() for name, tensor in engine.live.items()}
    for seed in (1, 2, 3):
        handle, sent = new_handle("side"), bindable(seed)
        receiving = start(lambda handle=handle: engine.attend_by_wire(handle))
        if sender == "stock":
            asyncio.run(BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True).async_send_weights(iter(sent.items())))
        else:
            BucketSender(handle, 4_096, WAIT_S).send(sent.items())
        receiving.result(WAIT_S)
        assert engine.holds(sent)
        assert engine.side.receipt.tensors == len(sent) and engine.side.receipt.proven
    assert {name: tensor.data_ptr() for name, tensor in engine.live.items()} == addresses
    assert engine.binds == [f"verl-test-{os.getpid()}"], "the model is bound once"
    assert engine.receiver.serving_version() == f"verl-test-{os.getpid()}/3"


def test_what_an_engine_has_given_up_is_not_served_when_an_update_fails_before_it_begins(engine: Engine) -> None:
    engine.side.learn(described(engine.live))
    handle, sent = new_handle("side"), bindable(1)
    receiving = start(lambda: engine.attend_by_wire(handle))
    BucketSender(handle, 4_096, WAIT_S).send(sent.items())
    receiving.result(WAIT_S)

    def lost() -> Iterator:
        raise ValueError("lost a shard")
        yield

    for engine.sleeps in (False, True):
        handle = new_handle("side")
        receiving = start(lambda handle=handle: engine.attend_by_wire(handle))
        with pytest.raises(ValueError, match="lost a shard"):
            BucketSender(handle, 4_096, WAIT_S).send(lost())
        with pytest.raises(headrace.Unavailable):
            receiving.result(WAIT_S)
        assert (engine.receiver.serving_version() is None) == engine.sleeps
    handle = new_handle("side")
    receiving = start(lambda: engine.attend_by_wire(handle))
    BucketSender(handle, 4_096, WAIT_S).send(sent.items())
    receiving.result(WAIT_S)
    assert engine.holds(sent) and engine.receiver.serving_version() is not None
    engine.side.passed_by()
    assert engine.receiver.serving_version() is None


def test_an_unknown_name_fails_the_update_by_name_and_a_full_one_heals_it(engine: Engine) -> None:
    engine.side.learn(described(engine.live))
    handle = new_handle("side")
    receiving = start(lambda: engine.attend_by_wire(handle))
    BucketSender(handle, 4_096, WAIT_S).send({**bindable(1), "visitor": torch.ones(3)}.items())
    with pytest.raises(headrace.Error, match="visitor"):
        receiving.result(WAIT_S)
    assert engine.receiver.serving_version() is None and not engine.running
    again, sent = new_handle("side"), bindable(2)
    receiving = start(lambda: engine.attend_by_wire(again))
    BucketSender(again, 4_096, WAIT_S).send(sent.items())
    receiving.result(WAIT_S)
    assert engine.holds(sent) and engine.receiver.serving_version() is not None


def test_a_missing_tensor_fails_the_update_by_name(engine: Engine) -> None:
    engine.side.learn(described(engine.live))
    handle, sent = new_handle("side"), bindable(1)
    del sent["layers.7.bias"]
    receiving = start(lambda: engine.attend_by_wire(handle))
    BucketSender(handle, 4_096, WAIT_S).send(sent.items())
    with pytest.raises(headrace.Error, match=r"layers\.7\.bias"):
        receiving.result(WAIT_S)
    assert engine.receiver.serving_version() is None


def test_a_refusal_is_remembered_for_the_same_tensors() -> None:
    engine = Engine(refuse="packed by nobody knows whom")
    for _ in range(2):
        assert "nobody knows" in engine.side.learn(described(engine.live))
    assert len(engine.binds) == 1


@pytest.mark.parametrize(
    "message",
    [b"", b"{}", b"[]", b'{"job":"a"}', b'{"job":"a","version":"b","wait_s":"x","verdict":"","trainer":""}', b"\xff\xfe", b"null"],
)
def test_what_is_no_announcement_is_refused(message: bytes) -> None:
    with pytest.raises(headrace.InvalidArgument, match="no announcement"):
        Announcement.parse(message)


@pytest.mark.parametrize("wait_s", [b"NaN", b"Infinity", b"0", b"-1", b'"x"', b"1" + b"0" * 400])
def test_an_announcement_whose_wait_would_not_end_is_refused(wait_s: bytes) -> None:
    with pytest.raises(headrace.InvalidArgument, match="no announcement of an update"):
        Announcement.parse(b'{"job": "j", "version": "j/1", "verdict": "", "trainer": "", "wait_s": ' + wait_s + b"}\n[]")


@pytest.mark.parametrize("tensors", [b'[["w","float32",[1e999]]]', b'[["w","float32",[NaN]]]', b"[" * 100_000, b"3", b'[["w"]]'])
def test_what_is_no_table_of_tensors_is_refused(tensors: bytes) -> None:
    with pytest.raises(headrace.InvalidArgument, match="no table of an update's tensors"):
        parse_tensors(tensors)


def test_an_announcement_that_nests_without_end_is_refused() -> None:
    with pytest.raises(headrace.InvalidArgument, match="no announcement of an update: RecursionError"):
        Announcement.parse(b"[" * 100_000 + b"\n[]")


@pytest.mark.parametrize("table", [b"", b"{", b"[[1]]", b'[["a","uint8",[1.5,"x"]]]', b"null", b"7"])
def test_what_is_no_table_of_tensors_is_refused_and_binds_nothing(table: bytes, engine: Engine) -> None:
    with pytest.raises(headrace.InvalidArgument, match="no table"):
        engine.side.attend(Announcement("job", "job/1", WAIT_S, table))
    assert engine.binds == []


class Rollout:
    """A CheckpointEngineWorker with verl's own sender, and the engine worker behind it."""

    def __init__(self, name: str, options: dict, **where: object) -> None:
        self.engine = Engine(engine=name, **where)
        self.checkpoint_engine = CheckpointEngineRegistry.new("headrace", bucket_size=1 << 20, **options)
        self.error: BaseException | None = None

    def update(self) -> None:
        handle = new_handle("rollout")
        rpc = start(lambda: self.engine.attend_by_wire(handle))
        sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
        asyncio.run(sender.async_send_weights(self.checkpoint_engine.receive_weights(global_steps=1)))
        rpc.result(WAIT_S)


class Cluster:
    """What verl's CheckpointEngineManager does with all of them, in its order."""

    def __init__(self, trainers: int, options: dict) -> None:
        new = CheckpointEngineRegistry.new
        self.backend = CheckpointEngineRegistry.get("headrace")
        self.actors = [new("headrace", is_master=rank == 0, bucket_size=1 << 20, **options) for rank in range(trainers)]
        self.options = options
        self.rollouts: list[Rollout] = []
        self.errors: list[BaseException | None] = []

    def add(self, name: str, **where: object) -> Rollout:
        self.rollouts.append(Rollout(name, self.options, **where))
        return self.rollouts[-1]

    def update(self, weights: dict[str, torch.Tensor]) -> dict:
        engines = [rollout.checkpoint_engine for rollout in self.rollouts]
        prepared = [engine.prepare() for engine in (*self.actors, *engines)]
        for_actors, for_rollouts = self.backend.build_topology(len(self.actors), len(engines), prepared)
        for kwargs, group in ((for_actors, self.actors), (for_rollouts, engines)):
            assert all(len(values) == len(group) for values in kwargs.values())
            for i, engine in enumerate(group):
                engine.init_process_group(**{name: values[i] for name, values in kwargs.items()})
        pulled = []

        def generator(rank: int) -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights.items()
            pulled.append(rank)

        receiving: list[Future] = [start(rollout.update) for rollout in self.rollouts]
        sending = [
            start(lambda actor=actor, rank=rank: asyncio.run(actor.send_weights(generator(rank), global_steps=7)))
            for rank, actor in enumerate(self.actors)
        ]
        self.errors = [future.exception(2 * WAIT_S) for future in (*sending, *receiving)]
        for error in filter(None, self.errors):
            raise error
        assert sorted(pulled) == list(range(len(self.actors))), "every trainer rank takes part in the collectives"
        for engine in (*self.actors, *engines):
            engine.finalize()
        return sending[0].result()

    def close(self) -> None:
        for actor in self.actors:
            actor._drop_sender()
        for rollout in self.rollouts:
            rollout.engine.side.forget()


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(trainers=2, options={"wait_s": WAIT_S, **getattr(request, "param", {})})
    yield made
    made.close()


def test_direct_delivery_to_two_replicas_three_times(cluster: Cluster) -> None:
    rollouts = [cluster.add("replica-0"), cluster.add("replica-1")]
    for seed in (1, 2, 3):
        sent = bindable(seed)
        metrics = cluster.update(sent)
        assert metrics["headrace/direct"] == 1
        assert all(rollout.engine.holds(sent) for rollout in rollouts)
        assert metrics["headrace/applied_bytes"] == 2 * sum(tensor.nbytes for tensor in sent.values())
        assert metrics["headrace/update_s"] > 0
    assert [len(rollout.engine.binds) for rollout in rollouts] == [1, 1], "an unchanged topology keeps its receivers"


def test_direct_delivery_to_the_ranks_of_one_engine(cluster: Cluster) -> None:
    rollouts = [cluster.add("replica-0", rank=rank, ranks=2) for rank in range(2)]
    sent = bindable(1)
    cluster.update(sent)
    assert all(rollout.engine.holds(sent) for rollout in rollouts)


def test_replicas_come_and_go(cluster: Cluster) -> None:
    first = cluster.add("replica-0")
    cluster.update(bindable(1))
    second = cluster.add("replica-1")
    cluster.update(bindable(2))
    assert first.engine.holds(bindable(2)) and second.engine.holds(bindable(2))
    cluster.rollouts.remove(first)
    third = cluster.add("replica-2")
    cluster.update(bindable(3))
    assert second.engine.holds(bindable(3)) and third.engine.holds(bindable(3))
    assert first.engine.holds(bindable(2)), "a replica that left is not written, although its receiver still lives"
    first.engine.side.forget()


@pytest.mark.parametrize("between", ["bound again", "written by verl's wire"])
def test_a_direct_update_follows_whatever_happened_to_a_receiver_in_between(between: str, cluster: Cluster) -> None:
    first, second = cluster.add("replica-0"), cluster.add("replica-1")
    cluster.update(bindable(1))
    if between == "bound again":
        first.engine.side.forget()
    else:
        handle = new_handle("between")
        receiving = start(lambda: first.engine.attend_by_wire(handle))
        BucketSender(handle, 4_096, WAIT_S).send(bindable(2).items())
        receiving.result(WAIT_S)
    assert cluster.update(bindable(3))["headrace/direct"] == 1
    assert first.engine.holds(bindable(3)) and second.engine.holds(bindable(3))


@pytest.mark.parametrize("cluster", [{"wait_s": 600.0}], indirect=True)
def test_a_trainer_that_gives_up_between_decision_and_session_lets_its_engines_go(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = cluster.add("replica-0")
    cluster.update(bindable(1))

    def refuse(*_: object) -> None:
        raise headrace.Unavailable("no descriptors left")

    with monkeypatch.context() as patch:
        patch.setattr(cluster.actors[0], "_connected", refuse)
        with pytest.raises(headrace.Unavailable, match="no descriptors left"):
            cluster.update(bindable(2))
    assert "has given it up before it began" in str(cluster.errors[-1])
    assert rollout.engine.holds(bindable(1)) and rollout.engine.receiver.serving_version() is not None
    cluster.update(bindable(3))
    assert rollout.engine.holds(bindable(3))


def test_what_waits_in_an_update_that_has_ended_elsewhere_ends_when_the_next_one_begins() -> None:
    actor, rollout = (
        CheckpointEngineRegistry.new("headrace", bucket_size=1 << 20, is_master=master, wait_s=600.0) for master in (True, False)
    )
    topology = CheckpointEngineRegistry.get("headrace").build_topology(1, 1, [actor.prepare(), rollout.prepare()])
    for engine, kwargs in zip((actor, rollout), topology, strict=True):
        engine.init_process_group(**{name: values[0] for name, values in kwargs.items()})

    async def first() -> None:
        async for _ in rollout.receive_weights():
            pass

    receiving = start(lambda: asyncio.run(first()))
    wait_until(lambda: any(thread.name.startswith("asyncio_") for thread in threading.enumerate()))
    rollout.prepare()
    with pytest.raises(headrace.Cancelled, match="another update has begun"):
        receiving.result(WAIT_S)
    sending = start(lambda: asyncio.run(actor.send_weights(iter(bindable(1).items()))))
    wait_until(lambda: os.path.exists(actor._handles[0].removeprefix("ipc://") + ".sock"))
    actor.prepare()
    with pytest.raises(headrace.Cancelled, match="another update has begun"):
        sending.result(WAIT_S)


@pytest.mark.parametrize("cluster", [{"direct": False}], indirect=True)
def test_delivery_through_verls_wire_writes_the_same(cluster: Cluster) -> None:
    rollouts = [cluster.add("replica-0"), cluster.add("replica-1")]
    for rollout in rollouts:
        rollout.engine.side.learn(described(rollout.engine.live))
    for seed in (1, 2):
        sent = bindable(seed)
        cluster.update(sent)
        assert all(rollout.engine.holds(sent) for rollout in rollouts)


def test_where_one_engine_cannot_be_bound_all_are_reached_through_verls_wire(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    able, unable = cluster.add("replica-0"), cluster.add("replica-1")
    unable.engine.refuse = "packed by nobody knows whom"
    with caplog.at_level(logging.WARNING, logger="headrace.integration.verl.backend"):
        for seed in (1, 2, 3):
            sent = bindable(seed)
            assert cluster.update(sent)["headrace/direct"] == 0
            assert able.engine.holds(sent) and unable.engine.holds(sent)
    assert able.engine.copied == 0 and able.engine.side.receipt.proven, "in place and proven all the same"
    assert unable.engine.copied == 3 * len(sent)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "1 of 2 engine workers cannot be written directly: packed by nobody knows whom" in said[0]
    # Another topology is another chance.
    cluster.rollouts.remove(unable)
    assert cluster.update(bindable(4))["headrace/direct"] == 1
    assert able.engine.holds(bindable(4))


@pytest.mark.parametrize("cluster", [{"wait_s": 600.0}], indirect=True)
@pytest.mark.parametrize("error", [headrace.InvalidArgument("no such rank"), TypeError("no such hook in this vLLM")])
def test_an_engine_that_fails_to_bind_fails_its_update_and_nobody_waits_for_it(error: Exception, cluster: Cluster) -> None:
    able, failing = cluster.add("replica-0"), cluster.add("replica-1")

    def fail(*_: object) -> None:
        raise error

    failing.engine.side._bind = fail
    with pytest.raises(type(error), match="no such"):
        cluster.update(bindable(1))
    assert [type(caught) for caught in cluster.errors if caught] == [type(error)], "the others are reached through verl's wire"
    assert able.engine.holds(bindable(1))
    # What failed may not fail again.
    failing.engine.side._bind = failing.engine.bind
    assert cluster.update(bindable(2))["headrace/direct"] == 1
    assert able.engine.holds(bindable(2)) and failing.engine.holds(bindable(2))


def test_an_announcement_that_does_not_fit_into_a_bucket_is_refused_with_the_option_to_raise() -> None:
    options = {"wait_s": 2.0}
    small = CheckpointEngineRegistry.new("headrace", bucket_size=1_000, **options)
    actor = CheckpointEngineRegistry.new("headrace", bucket_size=1_000, is_master=True, **options)
    topology = CheckpointEngineRegistry.get("headrace").build_topology(1, 1, [actor.prepare(), small.prepare()])
    for engine, kwargs in zip((actor, small), topology, strict=True):
        engine.init_process_group(**{name: values[0] for name, values in kwargs.items()})
    sending = start(lambda: asyncio.run(actor.send_weights(iter(bindable(1).items()))))

    async def first() -> None:
        async for _ in small.receive_weights():
            pass

    with pytest.raises(headrace.InvalidArgument, match="raise checkpoint_engine.update_weights_bucket_megabytes"):
        asyncio.run(first())
    with pytest.raises(headrace.Unavailable):
        sending.result(WAIT_S)


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b'["a"]', b'["a",false]'])
def test_what_is_no_verdict_is_refused(data: bytes) -> None:
    with pytest.raises(headrace.InvalidArgument, match="no verdict"):
        Verdict.parse(data)


def test_a_trainers_generator_that_raises_ends_the_update_and_the_next_one_works(cluster: Cluster) -> None:
    rollout = cluster.add("replica-0")
    cluster.update(bindable(1))

    class Broken(dict):
        def items(self) -> Iterator:
            yield from list(super().items())[:20]
            raise ValueError("lost a shard")

    with pytest.raises(ValueError, match="lost a shard"):
        cluster.update(Broken(bindable(2)))
    # The trainer's other rank fails in the same way; the engine worker and verl's sender before it end with the abort.
    assert all(cluster.errors) and isinstance(cluster.errors[-1], headrace.Error)
    assert rollout.engine.holds(bindable(1)), "nothing was sent before the source failed"
    cluster.update(bindable(3))
    assert rollout.engine.holds(bindable(3)) and rollout.engine.receiver.serving_version() is not None


def test_another_host_and_another_number_of_masters_are_refused() -> None:
    backend = CheckpointEngineRegistry.get("headrace")
    one = {"host": "a", "identity": "1", "master": True, "folder": "/tmp"}
    two = {"host": "b", "identity": "2", "master": False, "folder": "/tmp"}
    with pytest.raises(headrace.Unsupported, match="on 2 hosts"):
        backend.build_topology(1, 1, [one, two])
    with pytest.raises(headrace.InvalidArgument, match="0 of 1 trainer ranks are the master"):
        backend.build_topology(1, 1, [two, two])


def test_a_fan_serves_several_receivers_and_a_stream_hands_over_tensor_by_tensor() -> None:
    handles, sent = [new_handle("fan") for _ in range(3)], mixed()

    async def collect(handle: str) -> Landed:
        landed = Landed()
        async for name, tensor in BucketStream(handle, WAIT_S):
            landed.take([(name, tensor)])
        return landed

    receiving = [start(lambda handle=handle: asyncio.run(collect(handle))) for handle in handles]
    with BucketFan(handles, 2_000, WAIT_S) as fan:
        for name, tensor in sent.items():
            fan.put(name, tensor)
        fan.finish()
    for future in receiving:
        assert_same(future.result(WAIT_S), sent)


def test_a_stream_that_is_left_early_lets_the_sender_end() -> None:
    handle = new_handle("left")

    async def first() -> str:
        stream = BucketStream(handle, WAIT_S).__aiter__()
        name, _ = await anext(stream)
        await stream.aclose()
        return name

    receiving = start(lambda: asyncio.run(first()))
    BucketSender(handle, 2_000, WAIT_S).send(mixed().items())
    assert receiving.result(WAIT_S) == "u8.odd"


def test_an_announced_update_that_failed_before_it_was_waited_for_is_not_waited_for(engine: Engine) -> None:
    sent = described(engine.live)
    engine.side.learn(sent)
    job = engine.binds[0]
    announcement = Announcement(job, f"{job}/1", WAIT_S, dump_tensors(sent), trainer=new_handle("trainer"))
    since = engine.receiver.mark()
    with headrace.Sender.connect(job=job) as sender, pytest.raises(headrace.Error, match="visitor"):
        engine.side._still.set()
        sender.send(announcement.version, {**bindable(1), "visitor": torch.ones(3)}, progress=False)
    engine.side._still.clear()
    with pytest.raises(headrace.FailedPrecondition, match=f"update to {job}/1 has failed, rank 0 of replica-0 is idle: .*visitor"):
        engine.side.attend(announcement, since)
    assert not engine.running
