"""A model's files, tensor by tensor, into packed weights: no float copy of the model, no modules with memory.

Knows: which files hold which tensors, and which kind each matrix is packed as. Does not know: how rows are packed, when
weights are rounded (``open``), or where packed copies are kept.

"own" is the kind of a model that runs with the numbers its files have: each matrix is then of the kind that keeps them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from ...errors import ModelRefused
from ...types import Tell, silent
from ..cpu.formats import kind_for, known, row_bytes
from ..cpu.names import GGUF, HUGGING_FACE, Parts, Unfit, parts_from
from ..cpu.packed import Packed
from ..cpu.plan import Plan, plan_of, why_not
from ..lower import CLASSES
from ..quantize import QUANTIZATIONS
from ..stored import Stored, safetensors_in, safetensors_names, same_numbers
from .gguf import check_all_read, empty_model, mapped, read_tokenizer, rope_factors
from .gguf_header import FLOATS, Header, read_header
from .hub import Remote
from .loading import Loaded, capability, fetch_tokenizer
from .model_info import Outline, generation_in
from .quiet import quiet
from .refusals import model_class, refusals, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["OWN", "OWN_BITS", "Streamed", "pack_again", "stream_folder", "stream_gguf"]

OWN = "own"
OWN_BITS = "without dtype= and quantization= it runs with its own bits, several times faster"
_INSTEAD = (
    "use another quantization of the model (Q4_K_M, Q5_K_M, Q6_K, Q8_0), or dtype='float32', which spells them out"
)


class Streamed(NamedTuple):
    """A model whose weights are packed."""

    loaded: Loaded
    packed: Packed


def stream_gguf(
    path: Path, kind: str, tell: Tell = silent, tokenizer: PreTrainedTokenizerBase | None = None
) -> Streamed | str:
    """A GGUF file's weights packed as ``kind``; or the reason, in words, why the kernels cannot run it.

    ``tokenizer``: the one to use instead of the file's. Raises ModelRefused if the file is damaged, or has kinds of
    numbers that cannot be read.
    """
    header = read_header(path)
    model = empty_model(path, header)
    reason = why_not(model)
    if reason is not None:
        return reason
    try:
        plan = _rotated(plan_of(model, "int8" if kind == OWN else kind), header)
        weights = mapped(header)
        parts = parts_from(plan, weights, GGUF)
        read = {id(stored) for part in parts.values() for stored in part}
        check_all_read(path, header, (name for name, stored in weights.items() if id(stored) not in read))
        _check_ways(path, parts)
    except Unfit as error:
        raise ModelRefused(f"{path} {error}") from error
    notes = _notes(header, kind, parts, plan)
    if kind == OWN:
        plan = _own_plan(plan, parts)
    packed = _filled(plan, parts, path.name, tell)
    own = tokenizer if tokenizer is not None else read_tokenizer(path, header, model)
    report = capability(model, own)
    refuse(report.reasons)
    dtype = header.kind if kind == OWN else report.dtype
    report = replace(report, device="cpu", dtype=dtype, notes=(*report.notes, *notes))
    return Streamed(_loaded(model.config, model.generation_config, own, report), packed)


def stream_folder(
    folder: Path,
    kind: str,
    remote: Remote,
    tell: Tell = silent,
    *,
    name: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Streamed | None:
    """The weights of a folder with safetensors packed as ``kind``. None if they are to be read in the ordinary way,
    which also knows what to say of whatever is wrong with them. ``name``: the model's on the hub, if it is from there.
    ``tokenizer``: the one to use instead of the folder's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    paths = _weight_files(folder)
    if paths is None:
        return None
    try:
        with quiet(), torch.device("meta"):
            config = AutoConfig.from_pretrained(folder, **remote.options)
            family = model_class(config)
            if family is None or family.__name__ not in CLASSES or hasattr(config, "quantization_config"):
                return None
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except Exception:  # a damaged configuration raises anything; what, is said by whoever reads it next
        return None
    refuse(refusals(config, family))
    weights = None if why_not(model) is not None else safetensors_in(paths)
    plan = plan_of(model, "float32" if kind == OWN else kind) if weights is not None else None
    if weights is None or plan is None or not _has_its_head(weights, tied=plan.tied):
        return None
    try:
        parts = parts_from(plan, weights, HUGGING_FACE)
    except Unfit:
        return None
    if kind == OWN:
        plan = _own_plan(plan, parts)
    packed = _filled(plan, parts, name or folder.name, tell)
    tokenizer = tokenizer or fetch_tokenizer(name or str(folder), remote)
    generation = generation_in(folder) or model.generation_config
    report = replace(capability(model, tokenizer), device="cpu")
    refuse(report.reasons)
    return Streamed(_loaded(config, generation, tokenizer, report), packed)


def pack_again(path: Path, plan: Plan, tell: Tell = silent) -> Packed:
    """A GGUF file's weights by a plan that was made from this very file before."""
    try:
        return _filled(plan, parts_from(plan, mapped(read_header(path)), GGUF), path.name, tell)
    except Unfit as error:
        raise ModelRefused(f"{path} {error}") from error


def _filled(plan: Plan, parts: Parts, name: str, tell: Tell) -> Packed:
    packed = Packed(plan)
    packed.fill(parts, lambda share: tell(f"loading {name}: {share:.0%}"))
    for file in {stored.file for part in parts.values() for stored in part}:
        if file is not None:
            file.check_unchanged()
    return packed


def _loaded(config: Any, generation: Any, tokenizer: PreTrainedTokenizerBase | None, report: Any) -> Loaded:
    model = cast("PreTrainedModel", Outline(config, generation, report.architecture))
    return Loaded(model, tokenizer, report)


# -- GGUF ---------------------------------------------------------------------------------------------------------


def _check_ways(path: Path, parts: Parts) -> None:
    """Refuse what cannot be read, by name."""
    odd = sorted({stored.kind for part in parts.values() for stored in part if not known(stored.kind)})
    if odd:
        raise ModelRefused(f"{path} has weights in {' and '.join(odd)}, which the CPU kernels do not read: {_INSTEAD}")
    for name, part in parts.items():
        for stored in part:
            if not row_bytes(stored.kind, stored.shape[-1]):
                raise Unfit(f"is damaged: {name} has rows of {stored.shape[-1]} numbers, which {stored.kind} cannot")


def _own_plan(plan: Plan, parts: Parts) -> Plan:
    """The plan with the kind for every matrix that keeps its numbers."""
    kinds: dict[str, str] = {}
    for part, sources in parts.items():
        layer, _, key = part.rpartition(".")
        pieces = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "out": ("out",), "down": ("down",)}.get(key, ())
        for number, piece in enumerate(pieces):
            kinds[f"{layer}.{piece}"] = kind_for(sources[number % len(sources)].kind)[0]
    kind = Counter(kinds.values()).most_common(1)[0][0]
    table = kind_for(parts["embedding"][0].kind)[0]
    others = {name: each for name, each in kinds.items() if each != kind}
    if not plan.tied and (head := kind_for(parts["head"][0].kind)[0]) != table:
        others["head"] = head
    return replace(plan, kind=kind, table_kind=table, kinds=tuple(others.items()))


def _rotated(plan: Plan, header: Header) -> Plan:
    factors = rope_factors(header)
    if factors is None:
        return plan
    if len(factors) != len(plan.inverse_frequencies):
        raise Unfit(f"is damaged: it has {len(factors)} rotary factors for {len(plan.inverse_frequencies)} frequencies")
    speeds = torch.tensor(plan.inverse_frequencies) / factors
    return replace(plan, inverse_frequencies=tuple(speeds.tolist()))


def _notes(header: Header, kind: str, parts: Parts, plan: Plan) -> tuple[str, ...]:
    """What there is to say of a file's weights."""
    matrices = {stored.kind for matrix in plan.matrices() for stored in parts[matrix.part]}
    if kind != OWN:
        if kind_for(header.kind) == (kind, True):
            return (header.weights("packed"), f"{kind} keeps the very numbers of the file's {header.kind} layers")
        if kind not in QUANTIZATIONS:
            return (header.weights(f"spelt out as {kind}"), *(() if header.kind in FLOATS else (OWN_BITS,)))
        return (header.weights(f"rounded to {kind}"),)
    odd = sorted(way for way in matrices if not kind_for(way)[1])
    rest = f", but for its matrices in {' and '.join(odd)}, which are rounded to int8" if odd else ""
    return (header.weights(f"run as they are{rest}"),)


# -- safetensors --------------------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> dict[str, Path] | None:
    """Which file holds which tensor; None if that is not plain."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if single.exists():
            names = safetensors_names(single)
            return None if names is None else dict.fromkeys(names, single)
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        found = {str(name): folder / str(file) for name, file in places.items()}
        return found if all(path.exists() for path in found.values()) else None
    except (OSError, ModelRefused, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _has_its_head(weights: Mapping[str, Stored], *, tied: bool) -> bool:
    """Is the output head there, or the embedding it is tied to? Some files have the same numbers twice."""
    head = weights.get("lm_head.weight")
    if not tied or head is None:
        return tied == (head is None)
    return same_numbers(head, weights.get("model.embed_tokens.weight", head))
