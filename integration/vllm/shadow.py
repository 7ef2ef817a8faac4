"""What an engine's loaders and transforms do to its tensors, watched without touching the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the byte behind the last one, from the begin of the tensor's memory."""
    begin = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


@dataclass(slots=True)
class Written:
    """What was seen of one watched tensor."""

    sources: dict[str, None] = field(default_factory=dict)  # names, in the order of arrival
    unknown: bool = False  # it was also written from something that is no source and no watched tensor
    derived: bool = False  # it was also written from watched tensors


class Shadow(TorchDispatchMode):
    """While it is active every operation that would read or write a watched tensor meets a copy of its memory instead.

    Follows named sources through views, copies and computations to the watched tensors that they end in. Sees what goes through torch's
    dispatcher; a tensor's value that went through a Python number is lost, and shows as `Written.unknown`.
    """

    def __init__(self, watched: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._watched = {name: tensor.detach() for name, tensor in watched.items()}
        self._by_memory: dict[int, list[tuple[int, int, str]]] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._copied: set[int] = set()  # memories of the copies
        self._origin: dict[int, dict[str, None]] = {}
        self._computed: set[int] = set()  # memories of what was computed from watched tensors
        self._kept: list[torch.Tensor] = []  # a memory's key is its address: nothing may be freed while addresses are compared
        self.written: dict[str, Written] = {}
        for name, tensor in self._watched.items():
            self._by_memory.setdefault(self._key(tensor), []).append((*extent(tensor), name))

    @staticmethod
    def _key(tensor: torch.Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def source(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Names a tensor whose way is to be followed. It must own its memory."""
        self._kept.append(tensor)
        self._origin[self._key(tensor)] = {name: None}
        return tensor

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of the copy, for a tensor in watched memory; any other as it is."""
        key = self._key(tensor)
        if key not in self._by_memory:
            return tensor
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = tensor.untyped_storage().clone()
            self._copied.add(copy._cdata)
            self._by_memory[copy._cdata] = self._by_memory[key]
        elif key in self._copied:
            return tensor
        twin = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return twin.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    def shadow_of(self, name: str) -> torch.Tensor:
        """The copy of a watched tensor, with what was written to it."""
        return self.twin(self._watched[name])

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._swap, (args, kwargs or {}))
        result = func(*args, **kwargs)
        self._follow(func._schema, args, kwargs, result)
        return result

    def _swap(self, tensor: torch.Tensor) -> torch.Tensor:
        key = self._key(tensor)
        return self.twin(tensor) if key in self._by_memory and key not in self._copied else tensor

    def _follow(self, schema: Any, args: tuple, kwargs: dict, result: Any) -> None:
        read: list[torch.Tensor] = []
        mutated: list[torch.Tensor] = []
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = [value] if isinstance(value, torch.Tensor) else [v for v in _items(value) if isinstance(v, torch.Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (mutated if writes else read).extend(tensors)
        origin: dict[str, None] = {}
        derived = False
        for tensor in read:
            origin.update(self._origin.get(self._key(tensor), {}))
            derived = derived or self._key(tensor) in self._copied or self._key(tensor) in self._computed
        for tensor in mutated:
            self._note(tensor, origin, derived)
        for tensor in [result] if isinstance(result, torch.Tensor) else [v for v in _items(result) if isinstance(v, torch.Tensor)]:
            key = self._key(tensor)
            if key in self._copied or not (origin or derived):
                continue
            self._kept.append(tensor)
            self._origin.setdefault(key, dict(origin))
            if derived:
                self._computed.add(key)

    def _note(self, tensor: torch.Tensor, origin: dict[str, None], derived: bool) -> None:
        key = self._key(tensor)
        if key not in self._copied:
            if origin or derived:
                self._kept.append(tensor)
                self._origin.setdefault(key, {}).update(origin)
            if derived:
                self._computed.add(key)
            return
        begin, end = extent(tensor)
        for lo, hi, name in self._by_memory[key]:
            if begin < hi and lo < end:
                seen = self.written.setdefault(name, Written())
                seen.sources.update(origin)
                seen.derived = seen.derived or derived
                seen.unknown = seen.unknown or not (origin or derived)


def _items(value: Any) -> Iterable[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def random_tensor(dtype: torch.dtype, shape: Iterable[int], seed: int) -> torch.Tensor:
    """Random bytes that are finite numbers, small enough to be added and multiplied, in memory of their own."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).to(torch.bool)
    size = torch.empty(0, dtype=dtype).element_size()
    count = 1
    for dim in shape:
        count *= dim
    data = torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8)
    if dtype.is_floating_point and dtype != torch.float8_e8m0fnu:
        data[size - 1 :: size] &= 0xBF  # the exponent's highest bit: no infinity, no NaN
    if dtype == torch.float8_e8m0fnu:
        data &= 0x7F
    return data.view(dtype).reshape(shape)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and elements, bit by bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(torch.equal(_bits(a), _bits(b)))


def digest(tensor: torch.Tensor) -> bytes:
    """Of a tensor's elements in row-major order, bit by bit."""
    bits = _bits(tensor)
    return hashlib.blake2b(bits.numpy() if bits.numel() else b"", digest_size=16).digest()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().contiguous()
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor.reshape(-1)


def in_layers(names: Iterable[str]) -> Iterator[list[str]]:
    """Names in pieces that a loader may be given alone: those of one layer together, by the outermost number in a name; then those without
    a number."""
    layers: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        key = ("", "") if number is None else (".".join(parts[:number]), parts[number])
        layers.setdefault(key, []).append(name)
    yield from layers.values()
