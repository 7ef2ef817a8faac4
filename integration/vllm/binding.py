"""Which of a vLLM model's parameters are written in place, which by vLLM's own loader, and which not at all: tried out, not assumed."""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import headrace
import torch
from torch import nn

from .parts import in_parts
from .shadow import Shadow, Written, digest, extent, in_layers, random_tensor, same_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Brought:
    """A tensor of the trainer's checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def random(self) -> torch.Tensor:
        return random_tensor(self.dtype, self.shape, seed=zlib.crc32(self.name.encode()))

    def as_entry(self) -> tuple[str, torch.dtype, tuple[int, ...]]:
        return self.name, self.dtype, self.shape


@dataclass(slots=True)
class Binding:
    """How a model takes what a trainer brings.

    direct: parameter -> storage of the family's layout, with the parameter's bytes proved equal to what vLLM's loader makes.
    leased: groups of (checkpoint names, parameters) that vLLM's load_weights fills, in place. refused: parameter or name -> reason.
    dropped: names that vLLM's loader does nothing with. shared: names that lead only to memory of another model, and are left aside too.
    unreached: parameters that no name leads to. Of several models, a parameter has the prefix of its model before its name.
    """

    layout: headrace.Layout | None = None
    source: str = ""  # which layout the direct ones are from
    direct: dict[str, str] = field(default_factory=dict)
    leased: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    not_direct: dict[str, str] = field(default_factory=dict)  # leased parameter -> why it is not direct
    direct_names: set[str] = field(default_factory=set)
    loads: dict[str, set[str]] = field(default_factory=dict)  # prefix of a model -> names that its load_weights is given

    def leased_names(self) -> set[str]:
        return {name for names, _ in self.leased for name in names}

    def counts(self) -> dict[str, int]:
        """Of checkpoint tensors."""
        return {"direct": len(self.direct_names), "leased": len(self.leased_names()), "dropped": len(self.dropped) + len(self.shared)}


@dataclass(slots=True)
class _Seen:
    """What vLLM's loader does with a parameter."""

    sources: dict[str, None] = field(default_factory=dict)
    problem: str = ""
    plain: bool = True  # what the loader wrote is what the parameter holds after post-processing too
    digest: bytes = b""  # of what the loader wrote when it had the whole layer


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by its runtime name; a tied one under its first name. Without those that are views into the memory of
    another: these change with it."""
    named = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    kept: dict[str, torch.Tensor] = {}
    by_memory: dict[int, list[tuple[int, int]]] = {}
    for name in sorted(named, key=lambda name: not named[name].is_contiguous()):
        spans = by_memory.setdefault(named[name].untyped_storage().data_ptr(), [])
        begin, end = extent(named[name])
        if end == begin or not any(lo <= begin and end <= hi for lo, hi in spans):
            kept[name] = named[name]
            spans.append((begin, end))
    return {name: tensor for name, tensor in named.items() if name in kept}


class Binder:
    """Tries vLLM's loader and post-processing on random bytes, layer by layer and beside the live model, then ours on the same bytes.

    processed: whether the model went through post-processing, which is then part of the trial.
    """

    def __init__(self, model: nn.Module, brought: Sequence[Brought], *, processed: bool = True) -> None:
        self.model = model
        self.brought = {tensor.name: tensor for tensor in brought}
        self.processed = processed
        self.watched = tensors_of(model)
        self.seen: dict[str, _Seen] = {}
        self.failed: dict[str, str] = {}
        self._alone: dict[tuple[str, ...], str] = {}  # parameters -> what is wrong with a lease of theirs

    def shared_with(self, held: Mapping[str, torch.Tensor]) -> set[str]:
        """Watched tensors that lie in memory of these."""
        spans: dict[int, list[tuple[int, int]]] = {}
        for tensor in held.values():
            spans.setdefault(tensor.untyped_storage().data_ptr(), []).append(extent(tensor))
        shared = set()
        for name, tensor in self.watched.items():
            begin, end = extent(tensor)
            if any(lo < end and begin < hi for lo, hi in spans.get(tensor.untyped_storage().data_ptr(), ())):
                shared.add(name)
        return shared

    def reached(self) -> dict[str, torch.Tensor]:
        """Watched tensors that the trial led to."""
        return {name: self.watched[name] for name in self.seen}

    def try_layer(self, sources: Mapping[str, torch.Tensor], offers: list[_Offer]) -> None:
        shadow, loaded = self._load(sources)
        by_loader = copy.deepcopy(shadow.written)  # post-processing runs in the same shadow
        expected = {name: shadow.shadow_of(name) for name in by_loader}
        after = self._after_loading(shadow, expected) if self.processed else expected
        for param, written in by_loader.items():
            if written.derived and not written.sources:
                continue
            seen = self.seen.setdefault(param, _Seen())
            seen.sources.update(written.sources)
            seen.digest = digest(expected[param])
            if not written.sources:
                seen.problem = "vLLM's loader writes it from a value that cannot be followed"
            result = after.get(param)
            if isinstance(result, str):
                seen.problem = result
            elif result is not None and not same_bytes(result, expected[param]):
                seen.plain = False
        if not loaded:
            return
        for offer in offers:
            offer.compare(self.watched, by_loader, after, sources)

    def _load(self, sources: Mapping[str, torch.Tensor]) -> tuple[Shadow, bool]:
        """vLLM's load_weights with these, in a shadow. When it fails: name by name, so that the culprits are known."""
        shadow = Shadow(self.watched)
        named = [(name, shadow.source(name, tensor)) for name, tensor in sources.items()]
        if (error := self._load_in(shadow, named)) is None:
            return shadow, True
        if len(named) == 1:
            self.failed[named[0][0]] = error
            return shadow, False
        shadow = Shadow(self.watched)
        for name, tensor in sources.items():
            if (error := self._load_in(shadow, [(name, shadow.source(name, tensor))])) is not None:
                self.failed[name] = error
        return shadow, True

    def _load_in(self, shadow: Shadow, named: list[tuple[str, torch.Tensor]]) -> str | None:
        try:
            with torch.no_grad(), in_parts(), shadow:
                self.model.load_weights(iter(named))
        except Exception as error:  # whatever a model's loader raises for bytes that it does not like
            return f"{type(error).__name__}: {error}"
        return None

    def _after_loading(self, shadow: Shadow, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor | str]:
        """What each loaded parameter holds once its module's quantisation method has processed it; or why that is not known."""
        after: dict[str, torch.Tensor | str] = {}
        modules = dict(self.model.named_modules())
        owners: dict[str, list[str]] = {}
        for name in expected:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        before = {name: tensor.clone() for name, tensor in expected.items()}
        for path, names in owners.items():
            module = modules[path]
            method = getattr(module, "quant_method", None)
            if method is None or not hasattr(method, "process_weights_after_loading"):
                after.update((name, before[name]) for name in names)
                continue
            twin = _twin(module, shadow)
            try:
                with torch.no_grad(), shadow:
                    twin.quant_method.process_weights_after_loading(twin)
            except Exception as error:
                text = f"{type(method).__name__}.process_weights_after_loading could not be tried: {type(error).__name__}: {error}"
                after.update((name, text) for name in names)
                continue
            for name in names:
                after[name] = self._outcome(name, twin, type(method).__name__)
        expected.update(before)
        return after

    def _outcome(self, name: str, twin: nn.Module, method: str) -> torch.Tensor | str:
        leaf, live = name.rpartition(".")[2], self.watched[name]
        result = twin._parameters.get(leaf, twin._buffers.get(leaf))
        if result is None:
            return f"{method} removes it after loading"
        if (result.shape, result.dtype, result.stride()) != (live.shape, live.dtype, live.stride()):
            return f"{method} makes {result.dtype} {tuple(result.shape)} of it, the engine holds {live.dtype} {tuple(live.shape)}"
        return result.detach().clone()

    def assemble(self, best: _Offer | None, shared: set[str], leased: set[str]) -> Binding:
        """shared: parameters that another model holds. leased: names that another model leases, so that this one does too."""
        binding = Binding()
        seen = {param: one for param, one in self.seen.items() if param not in shared}
        reached = {name for one in seen.values() for name in one.sources}
        aside = {name for param in shared & self.seen.keys() for name in self.seen[param].sources} - reached
        binding.shared = tuple(name for name in self.brought if name in aside)
        binding.dropped = tuple(name for name in self.brought if name not in reached | aside and name not in self.failed)
        binding.unreached = tuple(
            name for name, _ in self.model.named_parameters() if name in self.watched and name not in seen and name not in shared
        )
        for name, error in self.failed.items():
            binding.refused[name] = f"vLLM's load_weights fails on it alone: {error}"
        equal = best.equal if best else {}
        for names, params in _components(seen):
            problem = next((seen[p].problem for p in params if seen[p].problem), "")
            direct = all(p in equal for p in params)
            if problem:
                binding.refused.update(dict.fromkeys(params, problem))
            elif direct and not leased & set(names):
                binding.direct.update((p, equal[p]) for p in params)
                binding.direct_names.update(names)
            elif reason := self._lease_problem(names, params):
                binding.refused.update(dict.fromkeys(params, reason))
            else:
                binding.leased.append((names, params))
                for p in params:
                    reason = best.reasons.get(p, "no family has a placement for it") if best else "no family"
                    binding.not_direct[p] = "another model leases a tensor that makes it" if direct else reason
        return binding

    def _lease_problem(self, names: tuple[str, ...], params: tuple[str, ...]) -> str:
        """Whether load_weights makes the same of a group's tensors alone as of the whole layer's."""
        if params not in self._alone:
            self._alone[params] = self._try_alone(names, params)
        return self._alone[params]

    def _try_alone(self, names: tuple[str, ...], params: tuple[str, ...]) -> str:
        if any(not self.seen[p].plain for p in params):
            return "post-processing changes what vLLM's loader wrote, and no family knows the result"
        lone = Shadow(self.watched)
        error = self._load_in(lone, [(name, lone.source(name, self.brought[name].random())) for name in names])
        if error is not None:
            return f"vLLM's load_weights does not take its tensors without the rest: {error}"
        outside = set(lone.written) - set(params)
        if any(lone.written[p].sources for p in outside):
            return f"vLLM's load_weights also writes {min(outside)} when it is given its tensors alone"
        different = next((p for p in params if digest(lone.shadow_of(p)) != self.seen[p].digest), "")
        return f"vLLM's load_weights makes other bytes of {different} when it is given its tensors alone" if different else ""

    def direct_layout(self, binding: Binding, best: _Offer | None) -> headrace.Layout:
        """The best offer's placements of what is written directly, under the parameters' names."""
        if best is None or not binding.direct:
            return headrace.Layout.identity(headrace.StorageTable.from_tensors({}))
        binding.source = best.label
        own = best.layout.only(binding.direct.values(), drop_maps=True)  # names may be those of another model's layers too
        return own.renamed({ours: theirs for theirs, ours in binding.direct.items()})


@dataclass(frozen=True)
class Member:
    """A model of an engine, and what its storages' names begin with. candidates: (label, layout)."""

    binder: Binder
    candidates: Iterable[tuple[str, headrace.Layout]]
    prefix: str = ""


def bind_together(members: Sequence[Member], held: Mapping[str, torch.Tensor] | None = None) -> Binding:
    """One binding for models of which each takes its part of what the same trainer brings; their binders were made for the same tensors.

    Of a model's candidates it takes the one by which most parameters are written directly, and it names what is refused. Memory that two of
    them have belongs to the first one that anything leads to; what is in `held` belongs to none. Raises headrace.Unsupported, by name, for
    a tensor that two models take and that cannot be placed for both.
    """
    brought = members[0].binder.brought
    offers = [[_Offer(label, layout) for label, layout in member.candidates] for member in members]
    for names in in_layers(brought):
        sources = {name: brought[name].random() for name in names}
        for member, offered in zip(members, offers, strict=True):
            member.binder.try_layer(sources, offered)
    best = [max(offered, key=lambda offer: len(offer.equal), default=None) for offered in offers]
    shared = []
    owned = dict(held or {})
    for member in members:
        shared.append(member.binder.shared_with(owned))
        owned |= {member.prefix + name: tensor for name, tensor in member.binder.reached().items()}
    leased: set[str] = set()
    while True:
        parts = [member.binder.assemble(*choice, leased) for member, *choice in zip(members, best, shared, strict=True)]
        more = {name for part in parts for name in part.leased_names()}
        if more <= leased or len(members) == 1:
            break
        leased = more
    binding = _together(members, parts)
    _lay_out(binding, members, parts, best)
    return binding


def _together(members: Sequence[Member], parts: Sequence[Binding]) -> Binding:
    """All but the layout."""
    brought = members[0].binder.brought
    binding = Binding()
    by_param: dict[str, _Seen] = {}
    for member, part in zip(members, parts, strict=True):
        prefix = member.prefix
        binding.direct |= {prefix + param: storage for param, storage in part.direct.items()}
        binding.refused |= {name if name in brought else prefix + name: reason for name, reason in part.refused.items()}
        binding.not_direct |= {prefix + param: reason for param, reason in part.not_direct.items()}
        binding.unreached += tuple(prefix + param for param in part.unreached)
        binding.direct_names |= part.direct_names
        binding.loads[prefix] = part.leased_names()
        by_param |= {prefix + param: _Seen(sources=dict.fromkeys(names)) for names, params in part.leased for param in params}
    binding.leased = _brought_together(brought, list(_components(by_param)))
    taken = binding.direct_names | binding.leased_names()
    aside = {name for part in parts for name in part.shared} - taken
    binding.shared = tuple(name for name in brought if name in aside)
    dropped = set.intersection(*(set(part.dropped) | aside for part in parts)) - aside
    binding.dropped = tuple(name for name in brought if name in dropped)
    return binding


def _brought_together(
    brought: Iterable[str], groups: list[tuple[tuple[str, ...], tuple[str, ...]]]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Groups whose tensors come in turns become one: a sender brings a group as a whole before it begins another."""
    at = {name: index for index, name in enumerate(brought)}
    merged: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    end = -1
    for names, params in sorted(groups, key=lambda group: min(at[name] for name in group[0])):
        if merged and min(at[name] for name in names) < end:
            merged[-1] = (merged[-1][0] + names, merged[-1][1] + params)
        else:
            merged.append((names, params))
        end = max(end, *(at[name] for name in names))
    return [(tuple(sorted(names, key=at.__getitem__)), params) for names, params in merged]


def _lay_out(binding: Binding, members: Sequence[Member], parts: Sequence[Binding], best: Sequence[_Offer | None]) -> None:
    brought = members[0].binder.brought
    layout: headrace.Layout | None = None
    for member, part, offer in zip(members, parts, best, strict=True):
        own = member.binder.direct_layout(part, offer)
        layout = own if layout is None else layout.join(own, prefix=member.prefix)
    binding.source = " + ".join(part.source for part in parts if part.source)
    outputs = [param for _, params in binding.leased for param in params]
    if outputs:
        watched = {member.prefix + name: tensor for member in members for name, tensor in member.binder.watched.items()}
        written = headrace.StorageTable.from_tensors({param: watched[param] for param in outputs})
        specs = {spec.name: spec for spec in headrace.Layout.identity(written).storages}
        groups = [
            headrace.Group(
                name=params[0],
                entries=[brought[name].as_entry() for name in names],
                outputs=[specs[p] for p in params],
                hook="load_weights",
            )
            for names, params in binding.leased
        ]
        layout = layout.with_groups(groups)
    aside = (*binding.dropped, *binding.shared)
    binding.layout = layout.dropping(aside) if aside else layout


class _Offer:
    """A family's layout, held against what vLLM's loader makes."""

    def __init__(self, label: str, layout: headrace.Layout) -> None:
        self.label = label
        self.layout = layout
        self.equal: dict[str, str] = {}  # parameter -> storage
        self.reasons: dict[str, str] = {}
        names: dict[str, set[str]] = {}
        for tensor in layout.tensors:
            for storage in tensor.storages:
                names.setdefault(storage, set()).add(tensor.name)
        specs = {spec.name: spec for spec in layout.storages}
        self.bytes = {name: spec.bytes for name, spec in specs.items()}
        self.by_names: dict[frozenset[str], list[str]] = {}
        for storage, brought in names.items():
            if specs[storage].alias_of is None:
                self.by_names.setdefault(frozenset(brought), []).append(storage)

    def compare(
        self,
        watched: Mapping[str, torch.Tensor],
        written: Mapping[str, Written],
        after: Mapping[str, torch.Tensor | str],
        sources: Mapping[str, torch.Tensor],
    ) -> None:
        """Writes the same bytes through our placements, into copies of what the engine holds, and looks whether all are equal."""
        pairs: dict[str, str] = {}
        for param, seen in written.items():
            if not seen.sources or isinstance(after.get(param), str):
                continue
            storages = self.by_names.get(frozenset(seen.sources), [])
            held = watched[param].numel() * watched[param].element_size()
            fitting = [s for s in storages if self.bytes[s] == held]
            if len(fitting) == 1:
                pairs[param] = fitting[0]
            else:
                sizes = [self.bytes[s] for s in storages]
                reason = f"storages of {sizes} bytes, the engine holds {held}" if storages else "no placement of just these tensors"
                self.reasons[param] = f"{self.label}: {reason}"
        if not pairs:
            return
        copies = {param: _copy_of(watched[param]) for param in pairs}
        try:
            layout = self.layout.only(pairs.values()).renamed({ours: theirs for theirs, ours in pairs.items()})
            wanted = {tensor.name for tensor in layout.tensors}
            table = headrace.StorageTable.from_tensors(copies)
            layout.place(table, [(name, tensor) for name, tensor in sources.items() if name in wanted], constants=True)
        except headrace.Error as error:
            self.reasons.update((param, f"{self.label}: {error}") for param in pairs)
            return
        for param, storage in pairs.items():
            if same_bytes(copies[param], after[param]):
                self.equal[param] = storage
            else:
                self.reasons[param] = f"{self.label}: its placements give other bytes than vLLM's loader"


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    copy_ = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    if tensor.numel():
        copy_.view(torch.uint8).copy_(tensor.view(torch.uint8)) if tensor.is_contiguous() else copy_.copy_(tensor)
    return copy_


def _twin(module: nn.Module, shadow: Shadow) -> nn.Module:
    """A module of the same class and attributes over the shadow's memory: what happens to it does not happen to the engine's."""

    def over(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        other = shadow.twin(tensor.detach())
        other = other.view_as(other)
        other.__class__ = tensor.__class__
        other.__dict__ = dict(tensor.__dict__)
        return other

    twin = copy.copy(module)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: over(tensor) for name, tensor in module._parameters.items()}
    twin._buffers = {name: over(tensor) for name, tensor in module._buffers.items()}
    twin.quant_method = copy.copy(module.quant_method)
    return twin


def _components(seen: Mapping[str, _Seen]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Names and parameters that hang together: (names, parameters), each in the order of arrival."""
    params_of: dict[str, list[str]] = {}
    for param, one in seen.items():
        for name in one.sources:
            params_of.setdefault(name, []).append(param)
    done: set[str] = set()
    for param in seen:
        if param in done:
            continue
        names: dict[str, None] = {}
        params: dict[str, None] = {}
        todo = [param]
        while todo:
            current = todo.pop()
            if current in params:
                continue
            params[current] = None
            for name in seen[current].sources:
                if name not in names:
                    names[name] = None
                    todo.extend(params_of[name])
        done.update(params)
        yield tuple(names), tuple(params)


def family_layouts(
    config: Mapping[str, Any],
    brought: Sequence[Brought],
    *,
    dtype: torch.dtype | None = None,
    tp: int = 1,
    ep: int = 1,
    rank: int = 0,
    redundant: int = 0,
) -> Iterator[tuple[str, headrace.Layout]]:
    """Every layout that a family has for this model, with tensors as they are brought and with floating-point ones kept as `dtype`. What a
    family refuses is said in the log."""
    tensors = [tensor.as_entry() for tensor in brought]
    layout = ",".join(word for word, ranks in ((f"tp{tp}", tp), (f"ep{ep}", ep)) if ranks > 1) or "tp1"
    deepseek = str(config.get("model_type", "")).startswith("deepseek_v4")
    attempts = [("deepseek_v4", variant) for variant in ("plain", "plain+fused_shared")] if deepseek else []
    attempts += [("fused_moe", variant) for variant in ("plain", "round_robin", "padded", "transposed")]
    attempts += [("dense", "stacked"), ("dense", "plain")]
    # Beside names that a family does not know, those that it knows keep their places.
    opened = {("fused_moe", variant): f"{variant}+open" for variant in ("plain", "round_robin", "padded", "transposed")}
    opened["dense", "stacked"] = "stacked+open"
    floats = {tensor.dtype for tensor in brought} & {torch.float32, torch.float16, torch.bfloat16}
    for kept in (None, dtype) if dtype is not None and floats - {dtype} else (None,):
        for family, variant in attempts:
            for words in filter(None, (variant, opened.get((family, variant)))):
                label = f"{family}, {words}, {layout}" + (f", kept as {kept}" if kept else "")
                try:
                    built = headrace.Layout.build(
                        config=dict(config),
                        family=family,
                        variant=words,
                        layout=layout,
                        rank=rank,
                        redundant_experts=redundant,
                        dtype=kept,
                        tensors=tensors,
                    )
                except headrace.Error as error:
                    logger.debug("headrace: no layout %s: %s", label, error)
                else:
                    yield label, built
                    break
