"""verl's own driver under Ray: its manager, worker groups, CheckpointEngineWorkers, adapters, replicas and servers around our two ends."""

import asyncio
import contextlib
import inspect
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import verl_cpu_platform  # noqa: F401

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
import ray
import verl.checkpoint_engine.base
import verl.single_controller.ray.base
import yaml
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica
from verl_ray_server import Server
from verl_ray_trainer import MODEL, Trainer
from vllm_models import folder as model_folder
from weight_streams import left_behind, nothing_left_behind, start

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
TRAINERS = 2
# Bounds on a busy machine for what takes seconds on an idle one.
START_S, SOON_S = 300.0, 60.0
# Of our waits: none may end by it.
LONG_S = 3_600.0


def guide_config(guide: str) -> dict:
    """What a guide tells to add to the command line, below actor_rollout_ref.rollout."""
    block = re.search(r"^## Config$.*?^```\n(.*?)^```$", (GUIDES / guide).read_text(), re.M | re.S).group(1)
    config: dict = {}
    for line in block.splitlines():
        path, _, value = line.removeprefix("+").removeprefix("actor_rollout_ref.rollout.").partition("=")
        *folders, leaf = path.split(".")
        inner = config
        for key in folders:
            inner = inner.setdefault(key, {})
        inner[leaf] = yaml.safe_load(re.sub(r"([{,]\w+):", r"\1: ", value))
    return config


class Calls(RayWorkerGroup):
    """verl's worker group, which remembers the updates that it has begun."""

    updates: list[ray.ObjectRef] = []

    def _execute_remote_single_worker(self, worker: Any, method_name: str, *args: Any, **kwargs: Any) -> ray.ObjectRef:
        reference = super()._execute_remote_single_worker(worker, method_name, *args, **kwargs)
        if method_name == "update_weights":
            Calls.updates.append(reference)
        return reference


class FreePort:
    """In place of verl's task that looks for a port: a process with all of verl's imports for each worker group."""

    def options(self, **_: Any) -> "FreePort":
        return self

    def remote(self, **_: Any) -> ray.ObjectRef:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            return ray.put(("127.0.0.1", str(found.getsockname()[1])))


class Cluster:
    """Two standalone replicas of one vLLM engine each, and trainers for them."""

    def __init__(self) -> None:
        disaggregated, colocated = guide_config("verl_disaggregated.md"), guide_config("verl_colocated.md")
        settings = disaggregated["checkpoint_engine"]
        assert settings["update_weights_bucket_megabytes"] == 16
        # For an update through verl's wire, which takes no tensor that is larger.
        settings["update_weights_bucket_megabytes"] = 64
        settings["engine_kwargs"]["headrace"]["wait_s"] = LONG_S
        vllm = colocated["engine_kwargs"]["vllm"]
        vllm["additional_config"]["headrace"]["wait_s"] = LONG_S
        assert disaggregated["engine_kwargs"]["vllm"].items() <= vllm.items()
        self.config = RolloutConfig(
            name="vllm",
            tensor_model_parallel_size=1,
            engine_kwargs={"vllm": vllm},
            checkpoint_engine=CheckpointEngineConfig(**settings),
        )
        self.model = HFModelConfig(path=model_folder(json.dumps(MODEL)), load_tokenizer=False)
        # verl's socket from CheckpointEngineWorker to engine is named after the job, which is the first in every cluster, and the replica.
        first = os.getpid() * 10
        self.replicas = [vLLMReplica(first + i, self.config, self.model, gpus_per_node=1) for i in range(2)]
        for replica in self.replicas:
            replica.server_class = ray.remote(Server)
        self.trainers: RayWorkerGroup | None = self.started_trainers()
        asyncio.run(self.start())
        # For the tests that end the first ones.
        self.spare: RayWorkerGroup | None = self.started_trainers()

    async def start(self) -> None:
        await asyncio.wait_for(asyncio.gather(*(replica.init_standalone() for replica in self.replicas)), START_S)

    def started_trainers(self) -> RayWorkerGroup:
        return Calls(
            RayResourcePool([TRAINERS], max_colocate_count=1),
            RayClassWithInitArgs(ray.remote(Trainer), self.config, [replica.replica_rank for replica in self.replicas]),
            device_name="cpu",
        )

    def manager(self, replicas: list[vLLMReplica], backend: str = "") -> CheckpointEngineManager:
        if self.trainers is None:
            self.trainers, self.spare = self.spare or self.started_trainers(), None
        config = CheckpointEngineConfig(backend="naive") if backend else self.config.checkpoint_engine
        return CheckpointEngineManager(config, self.trainers, list(replicas))

    def stop_trainers(self) -> None:
        for worker in self.trainers.workers:
            ray.kill(worker)
        self.trainers = None


def look(replica: vLLMReplica, what: str) -> Any:
    return ray.get(replica.servers[0].look.remote(what), timeout=SOON_S)


def call(replica: vLLMReplica, method: str, *args: Any) -> Any:
    return ray.get(replica.servers[0].call.remote(method, *args), timeout=SOON_S)


ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hr-"))
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        here = Path(__file__).parent
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (here, here.parent, here.parent / "vllm"))))
        patch.setenv("XDG_RUNTIME_DIR", folder)
        patch.setenv("TMPDIR", folder)  # of the processes that Ray kills, which take nothing away
        patch.setattr(verl.checkpoint_engine.base, "RayWorkerGroup", Calls)
        patch.setattr(verl.single_controller.ray.base, "get_master_addr_port", FreePort())
        ray.init(
            num_cpus=64,
            num_gpus=16,
            object_store_memory=80 << 20,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=f"{folder}/ray",
        )
        stack.callback(ray.shutdown)
        print(f"\n{inspect.getfile(CheckpointEngineManager)} of verl {metadata.version('verl')}, Ray {ray.__version__}")
        yield Cluster()


def leftovers() -> set[str]:
    """Segments, and files of sockets: ours and verl's."""
    verls = Path("/tmp").glob(f"rl-colocate-zmq-{ray.get_runtime_context().get_job_id()}-replica-{os.getpid()}*")
    ours = Path(os.environ["TMPDIR"]).glob("headrace-verl-*")
    return left_behind() | {str(path) for path in (*verls, *ours)}


@pytest.fixture(autouse=True)
def tidy(cluster: Cluster) -> Iterator[None]:
    with nothing_left_behind(leftovers):
        yield


def updated(manager: CheckpointEngineManager, step: int) -> tuple[dict, list[dict[str, str]]]:
    """The metrics of an update with new weights, and what the trainer's ranks hold of them."""
    trained = manager.actor_wg.train(step)
    begin = time.monotonic()
    metrics = start(lambda: manager.update_weights(global_steps=step)).result(SOON_S)
    print(f"update {step}: {time.monotonic() - begin:.2f} s, {metrics}")
    return metrics, trained


def test_three_updates_reach_the_engine_directly_and_in_place(cluster: Cluster) -> None:
    replica = cluster.replicas[0]
    manager = cluster.manager([replica])
    before = look(replica, "addresses")
    for step in (1, 2, 3):
        look(replica, "taken_calls")
        metrics, trained = updated(manager, step)
        assert metrics["headrace/direct"] == 1 and metrics["headrace/applied_bytes"] > 0
        assert look(replica, "digests") == trained
        assert look(replica, "filled_up") == [True, True]
        assert look(replica, "status")["serving"]
        calls = [name for name, _ in look(replica, "taken_calls")]
        assert [name for name in calls if name in ORDER] == ORDER, "the engine was still and without its old weights"
    assert look(replica, "addresses") == before
    assert look(replica, "status")["ways"] == {"direct": len(trained[0]), "leased": 0, "dropped": 0}


ORDER = ["pause_generation", "sleep 2", "update_weights_from_ipc", "reset_mm_cache", "resume_generation"]


def test_replicas_come_and_go_between_updates(cluster: Cluster) -> None:
    first, second = cluster.replicas
    manager = cluster.manager([first])
    updated(manager, 10)
    manager.add_replicas([second])
    metrics, trained = updated(manager, 11)
    assert metrics["headrace/direct"] == 1
    assert look(first, "digests") == look(second, "digests") == trained
    manager.remove_replicas([first])
    metrics, later = updated(manager, 12)
    assert metrics["headrace/direct"] == 1
    assert look(second, "digests") == later
    assert look(first, "digests") == trained, "who left is not written"


def test_the_switch_takes_one_update_through_verls_wire(cluster: Cluster) -> None:
    first, second = cluster.replicas
    manager = cluster.manager(cluster.replicas)
    updated(manager, 20)
    ray.get(second.servers[0].collective_rpc.remote("hr_use_stock"), timeout=SOON_S)
    metrics, trained = updated(manager, 21)
    assert metrics["headrace/direct"] == 0
    assert look(first, "digests") == look(second, "digests") == trained
    assert look(first, "receipt")["proven"] and look(first, "status")["serving"]
    assert not look(second, "status")["serving"], "somebody else has written it"
    metrics, trained = updated(manager, 22)
    assert metrics["headrace/direct"] == 1
    assert look(first, "digests") == look(second, "digests") == trained


def test_colocated_updates_are_in_place_from_the_second_on(cluster: Cluster) -> None:
    manager = cluster.manager(cluster.replicas, backend="naive")
    before = [look(replica, "addresses") for replica in cluster.replicas]
    for replica in cluster.replicas:
        look(replica, "forget")
    for step in (30, 31):
        _, trained = updated(manager, step)
        assert all(look(replica, "digests") == trained for replica in cluster.replicas)
    assert [look(replica, "addresses") for replica in cluster.replicas] == before
    for replica in cluster.replicas:
        receipt = look(replica, "receipt")
        assert receipt["proven"] and receipt["version"].startswith(f"verl-{ray.get_runtime_context().get_job_id()}/")


def failed(manager: CheckpointEngineManager, *ends: str) -> list[BaseException]:
    """What an update ends with on each rank of the trainer and on each CheckpointEngineWorker, of which nobody may wait for long."""
    manager.actor_wg.train(40)
    manager.actor_wg.end_while(list(ends))
    Calls.updates.clear()
    begin = time.monotonic()
    with pytest.raises(ray.exceptions.RayError):
        start(lambda: manager.update_weights(global_steps=40)).result(SOON_S)
    print(f"the manager had its error after {time.monotonic() - begin:.2f} s")
    errors = []
    for reference in Calls.updates:
        with pytest.raises(ray.exceptions.RayError) as caught:
            ray.get(reference, timeout=SOON_S)
        errors.append(caught.value)
        print(f"{time.monotonic() - begin:.2f} s: {str(caught.value).strip().splitlines()[-1][:400]}")
    # Not even the weights of before: verl had the engine give them up.
    assert not any(look(replica, "status")["serving"] for replica in manager.replicas)
    return errors


def test_a_trainer_that_is_killed_while_it_sends_leaves_a_torn_rank_which_the_next_update_heals(cluster: Cluster) -> None:
    replica = cluster.replicas[0]
    manager = cluster.manager([replica])
    updated(manager, 39)
    assert look(replica, "status")["serving"]
    look(replica, "taken_calls")
    errors = failed(manager, "applying", "")
    cluster.stop_trainers()
    assert isinstance(errors[0], ray.exceptions.ActorDiedError)
    assert look(replica, "status")["state"] == "torn"
    said = dict(look(replica, "taken_calls"))["update_weights_from_ipc"]
    assert "has failed" in said and "is torn" in said
    manager = cluster.manager([replica])
    metrics, trained = updated(manager, 41)
    assert metrics["headrace/direct"] == 1
    assert look(replica, "digests") == trained and look(replica, "status")["serving"]


def test_a_trainer_that_fails_before_it_knows_its_names_lets_its_rollouts_go(cluster: Cluster) -> None:
    replica = cluster.replicas[0]
    manager = cluster.manager([replica])
    for _ in range(2):
        failed(manager, "raising", "raising")
    _, trained = updated(manager, 50)
    assert look(replica, "digests") == trained
    failed(manager, "raising", "raising")
    failed(manager, "pulling", "")
    cluster.stop_trainers()
