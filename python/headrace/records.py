"""Values that the package gives to its callers or takes from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .views import View


def _drawn(record: Any) -> str:
    import json
    from dataclasses import asdict

    from . import _core

    return _core.draw(json.dumps(asdict(record)))


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """One piece of live storage. strides: elements, empty for row-major. bytes: from the first to the last element."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    bytes: int = 0
    optional: bool = False
    alias_of: str | None = None
    owners: tuple[str, ...] = ("target",)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One checkpoint tensor that a rank wants. shape: of the whole tensor. group: the staged group that it belongs to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storages: tuple[str, ...]
    scope: str
    group: str | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors that land by computation: when all are there, hook(group, inputs, work, outputs) makes the outputs of them.

    entries: [(name, dtype, shape)] of whole checkpoint tensors. outputs: storages that the hook writes, by name, or as StorageSpec where
    the layout has none of that name. work_bytes: scratch that the hook wants for itself.
    """

    name: str
    entries: list[tuple[str, str, tuple[int, ...]]]
    outputs: list[str | StorageSpec]
    hook: str = "load_weights"
    work_bytes: int = 0
    scope: str = "target"


@dataclass(frozen=True, slots=True)
class Phases:
    """Milliseconds of each phase of an update."""

    manifest: float
    transfer: float
    prepare: float
    commit: float


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one rank says of one update. Sizes are bytes; outputs are (storage, proof) of those that are not proved byte for byte."""

    engine: str
    rank: int
    version: str
    session: int
    data_path: str
    device: str
    wire_bytes: int
    applied_bytes: int
    tensors: int
    expert_tensors: int
    buckets: int
    batches: int
    copies: int
    runs: int
    run_experts: int
    fingerprints: int
    engram_calls: int
    plan_cached: bool
    proven: bool
    proved_bytes: int
    proved_converted: int
    proved_inputs: int
    outputs: tuple[tuple[str, str], ...]
    phases_ms: Phases

    def _repr_svg_(self) -> str:
        """A timeline, which notebooks show."""
        return _drawn(self)


@dataclass(frozen=True, slots=True)
class Report:
    """What one update did, over all receivers, as this sender saw it. Sizes are bytes."""

    version: str
    session: int
    wire_bytes: int
    applied_bytes: int
    registered_bytes: int
    data_path: str
    buckets: int
    proven: bool
    total_ms: float
    phases_ms: Phases
    ignored: int
    ignored_names: tuple[str, ...]
    receipts: tuple[Receipt, ...]

    def _repr_svg_(self) -> str:
        """A timeline, which notebooks show."""
        return _drawn(self)


@dataclass(frozen=True, slots=True)
class Status:
    """What a receiver says of itself. serving: whether the guard of its engine is open."""

    job: str
    engine: str
    rank: int
    ranks: int
    pid: int
    state: str
    version: str | None
    attempted_version: str | None
    serving: bool
    updates: int
    storages: int
    storage_bytes: int
    engram_calls: int
    memory_extra_bytes_max: int
    table: str
    family: str
    layout: str
    variant: str
    last_failure: str | None
    discards: int


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Of what a rank holds of a tensor: value is 32 hexadecimal digits, box is (lo, hi) of the part in elements of the whole tensor."""

    value: str
    dtype: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, ...], tuple[int, ...]]
    copies: int
    equal: bool


@dataclass(frozen=True, slots=True)
class ReceiverInfo:
    """A receiver that a sender is connected to."""

    endpoint: str
    engine: str
    rank: int
    ranks: int
    version: str | None
    state: str
    scopes: tuple[str, ...]


@dataclass(slots=True)
class Hooks:
    """What an engine is asked to do. All are optional; they run on a thread of the receiver, one at a time, and must return in bounded
    time.

    What a hook raises fails the update; the exception is the __cause__ of what the engine's own call raises.

    quiescent(): before an update is taken, and again before it is published. Returning attests that no forward pass runs or starts until
        the guard opens; False refuses.
    locate(): {storage: tensor} as they are now. Without it the tensors of the table are asked where they are.
    expert_map(): logical expert of each physical slot, [layer][slot], over all ranks.
    launch_constants(): {name: number} of what captured graphs have by value. Without it what was committed last.
    derive(): after the last byte and its proof: refresh what is derived from the weights, in place.
    finish_tables(): before derive, only when rows of host-resident tables came.
    committed(): after the commit: invalidate caches.
    staged: {hook: callable(group, inputs, work, outputs)} for staged groups. inputs and outputs are lists of View, work is a memoryview;
        all are lent until it returns.
    """

    quiescent: Callable[[], Any] | None = None
    locate: Callable[[], Mapping[str, Any]] | None = None
    expert_map: Callable[[], Sequence[Sequence[int]]] | None = None
    launch_constants: Callable[[], Mapping[str, float]] | None = None
    derive: Callable[[], Any] | None = None
    finish_tables: Callable[[], Any] | None = None
    committed: Callable[[], Any] | None = None
    staged: Mapping[str, Callable[[str, list[View], memoryview, list[View]], Any]] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """A part of a checkpoint tensor. shape: of the whole tensor. box: (lo, hi) of the part, in elements of the whole tensor."""

    tensor: Any
    shape: Sequence[int]
    box: tuple[Sequence[int], Sequence[int]]
