"""A model's name -> the model, its tokenizer, and a report of what it can and cannot do, and why.

Knows: where models come from (a folder, the hub, a GGUF file, a live object) and which kinds cannot be served.
Does not know: how a model is run, or the embedded default.

Weights are read from safetensors or GGUF only. Pickle runs code when it is read, so it is refused.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import HeadstartError, InvalidParameter, MissingExtra, ModelNotFound, ModelRefused
from ...types import Tell, silent
from ..runner import attention_kinds, context_limit
from .faults import check_folder, check_snapshot, explained, local_path
from .gguf import read_gguf
from .gguf_header import FLOATS, is_gguf, read_header
from .hub import Remote, found_at
from .quiet import quiet
from .refusals import model_class, refusals, refuse

if TYPE_CHECKING:  # what makes models takes seconds to import, and a model whose weights lie packed needs none of it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Capability",
    "Loaded",
    "capability",
    "device_for",
    "eos_ids",
    "fetch_tokenizer",
    "find_model",
    "load",
    "quiet",
    "read_gguf",
    "same_tokenizer",
    "tokenizers_differ",
]

_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True)
class Capability:
    """What a model is and whether it can be served. ``reasons`` says why not; ``notes`` what to keep in mind."""

    architecture: str
    parameters: int
    bytes: int
    layers: int
    vocab_size: int  # rows of the output head
    tokenizer_size: int | None  # ids the tokenizer knows; the head may have more
    max_context: int | None
    sliding_window: int | None
    dtype: str
    device: str
    supported: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    kernels: str = "torch"  # what computes: "torch", "Triton", or "C++" with the instructions it uses


@dataclass(frozen=True)
class Loaded:
    """A model ready to be run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    report: Capability


def load(
    model: str | Path | PreTrainedModel,
    *,
    tokenizer: str | Path | PreTrainedTokenizerBase | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: Any = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
    tell: Tell = silent,
) -> Loaded:
    """Load a model from a folder, a ``.gguf`` file or the Hugging Face hub, or take a live one as it is.

    ``dtype="auto"`` is the checkpoint's on a GPU and float32 on the CPU; ``device`` defaults to the GPU if there is
    one. ``token`` (or HF_TOKEN) opens gated repositories. ``tell``: told of what takes long. Raises ``ModelRefused`` or
    ``ModelNotFound``.
    """
    wanted, place = _dtype(dtype), device_for(device)
    remote = Remote(revision, token, local_files_only, trust_remote_code)
    if trust_remote_code:
        warnings.warn("trust_remote_code is on: code from the model's repository will run here", stacklevel=2)
    notes: tuple[str, ...] = ()
    if device_map is not None and is_gguf(model):
        raise InvalidParameter("device_map", "is for folders and hub ids, not for a .gguf file")
    if device_map is not None and device is not None:
        raise InvalidParameter("device_map", "says where the model goes, and so does device: leave one of them out")
    if not isinstance(model, (str, Path)):
        if not hasattr(model, "config"):
            raise InvalidParameter(
                "model", f"must be a folder, a .gguf file, a hub id or a Hugging Face model, not {model!r}"
            )
        ready, own = model, None
        refuse(refusals(ready.config, type(ready)))
        if device is not None or wanted is not None:
            ready = ready.to(device=device, dtype=wanted)
    else:
        if wanted is None and place.type == "cpu" and device_map is None:
            wanted = torch.float32
        ready, own, notes = _fetch(model, wanted, device_map, remote, tell)
        if device_map is None:
            ready = ready.to(place)
    if isinstance(tokenizer, (str, Path)):
        own = fetch_tokenizer(str(tokenizer), remote)
        if own is None:
            raise ModelNotFound(f"there is no tokenizer in {tokenizer}")
    elif tokenizer is not None:
        own = tokenizer
    report = capability(ready, own)
    refuse(report.reasons)
    return Loaded(ready.eval(), own, replace(report, notes=report.notes + notes))


def device_for(device: str | torch.device | None) -> torch.device:
    """Where a model goes: a GPU if there is one and nothing else is asked for. One that is not here is refused."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidParameter("device", f"must be 'cpu', 'cuda' or 'cuda:N', not {device!r}") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InvalidParameter("device", f"is {device}, but this machine has {torch.cuda.device_count()} CUDA GPUs")
    return place


def capability(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Capability:
    """Describe a live model, and say whether it can be served."""
    config = model.config.get_text_config(decoder=True)
    reasons = refusals(model.config, type(model))
    head = model.get_output_embeddings()
    vocabulary = int(getattr(head, "out_features", 0) or getattr(config, "vocab_size", 0))
    size = len(tokenizer) if tokenizer is not None else None
    base = tokenizer.vocab_size if tokenizer is not None else 0  # without tokens that were added later
    if base > vocabulary and not reasons:
        reasons = (f"the tokenizer knows {base} tokens but the model only {vocabulary}: they do not belong together",)
    limit = context_limit(config)
    stated = getattr(config, "max_position_embeddings", None)
    notes = []
    if tokenizer is None:
        notes.append("no tokenizer: prompts must be token ids")
    if size is not None and size < vocabulary:
        notes.append(
            f"the output head has {vocabulary - size} more rows than the tokenizer; those ids are never emitted"
        )
    if size is not None and size > vocabulary >= base:
        notes.append(f"the tokenizer has {size - vocabulary} added tokens that the model lacks; they cannot be used")
    if limit is not None and stated is not None and limit < stated:
        notes.append(f"served up to {limit} tokens, not {stated}: beyond that its rotation depends on the batch")
    windows = [reach for kind, reach in attention_kinds(config).items() if kind == "sliding_attention" and reach]
    weights = list(model.parameters())
    return Capability(
        architecture=type(model).__name__,
        parameters=sum(weight.numel() for weight in weights),
        bytes=sum(weight.numel() * weight.element_size() for weight in weights),
        layers=int(getattr(config, "num_hidden_layers", 0)),
        vocab_size=vocabulary,
        tokenizer_size=size,
        max_context=limit,
        sliding_window=windows[0] if windows else None,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        supported=not reasons,
        reasons=reasons,
        notes=tuple(notes),
    )


def eos_ids(loaded: Loaded) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's, and the tokenizer's own."""
    found: set[int] = set()
    generation = getattr(loaded.model, "generation_config", None)
    for source in (generation, loaded.model.config.get_text_config(decoder=True), loaded.tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(token for token in found if 0 <= token < loaded.report.vocab_size))


def same_tokenizer(a: Loaded, b: Loaded) -> str | None:
    """Why b's token ids do not mean what a's mean; None when they do, or when one has no tokenizer to compare.

    Sizes of output heads say nothing: one tokenizer's models are padded to different sizes.
    """
    return None if a.tokenizer is None or b.tokenizer is None else tokenizers_differ(a.tokenizer, b.tokenizer)


def tokenizers_differ(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> str | None:
    """In what; None: in no token."""
    mine, other = a.get_vocab(), b.get_vocab()
    if mine == other:
        return None
    if len(mine) != len(other):
        return f"they use different tokenizers, of {len(mine)} and {len(other)} tokens"
    of_mine = {number: text for text, number in mine.items()}
    of_other = {number: text for text, number in other.items()}
    first = min(number for number in of_mine.keys() | of_other.keys() if of_mine.get(number) != of_other.get(number))
    return (
        f"they use different tokenizers: token {first} is {of_mine.get(first)!r} in the one "
        f"and {of_other.get(first)!r} in the other"
    )


# -- where it comes from ------------------------------------------------------------------------------------------


def find_model(name: str | Path, remote: Remote) -> Path:
    """The folder or file of a model, fetched only as far as its configuration. Raises ModelNotFound or ModelRefused."""
    path = local_path(name)
    if path is not None:
        return path
    try:
        return found_at(name, remote)
    except (OSError, ValueError) as error:
        raise explained(name, error, remote) from error


def _fetch(
    name: str | Path, dtype: torch.dtype | None, device_map: Any, remote: Remote, tell: Tell = silent
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None, tuple[str, ...]]:
    """The model, its tokenizer, and what there is to say of its weights."""
    path = local_path(name)
    if path is not None and is_gguf(path) and path.is_file():
        header = read_header(path)
        # A file of few bits has no type of its own: on a GPU it gets the one that models are trained in.
        model, tokenizer = read_gguf(path, dtype or (torch.float32 if header.kind == "F32" else torch.bfloat16), tell)
        how = "read" if header.kind in FLOATS else "spelt out"
        return model, tokenizer, (header.weights(f"{how} as {str(model.dtype).removeprefix('torch.')}"),)
    if device_map is not None and find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "placement")
    if path is None and not remote.offline:
        return _pretrained(str(name), dtype, device_map, remote), fetch_tokenizer(str(name), remote), ()
    if path is None:
        path = find_model(name, remote)
        check_snapshot(name, path)
    elif not path.is_dir():
        raise ModelRefused(f"{path} is a file: name the folder of the model, or a .gguf file")
    else:
        check_folder(path)
    with quiet():
        return _pretrained(str(path), dtype, device_map, remote), fetch_tokenizer(str(path), remote), ()


def _pretrained(name: str, dtype: torch.dtype | None, device_map: Any, remote: Remote) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: PreTrainedModel
    try:
        config = AutoConfig.from_pretrained(name, **remote.options)
        refuse(refusals(config, model_class(config)))  # before gigabytes are read
        model, about = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype or "auto",
            device_map=device_map,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # named below, where transformers points at its log
            output_loading_info=True,
            **remote.options,
        )
    except (HeadstartError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # damaged files raise whatever their readers happen to meet
        raise explained(name, error, remote) from error
    # transformers would go on with random numbers in their place.
    odd, lost = sorted(about["mismatched_keys"]), sorted(about["missing_keys"])
    if odd:
        weight, its, wanted = odd[0]
        raise ModelRefused(
            f"{name} has weights of other shapes than its config.json says, such as {weight}: {list(its)} instead of "
            f"{list(wanted)}"
        )
    if lost:
        raise ModelRefused(f"{name} lacks weights that {type(model).__name__} needs, such as {lost[0]}")
    return model


def fetch_tokenizer(name: str, remote: Remote) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder or of a model on the hub; None if it has none."""
    path = Path(name)
    if not path.is_dir() and remote.offline:
        path = find_model(name, remote)
    here = path.is_dir()
    if here and not any((path / file).exists() for file in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    source = str(path) if here else name
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source, **remote.options)
    except (HeadstartError, MemoryError):
        raise
    except Exception as error:  # the library tokenizers raises nothing more telling
        reason = explained(source, error, remote, "the tokenizer")
        if not here and isinstance(reason, ModelNotFound):
            return None  # a hub repository without one; the report says so
        raise reason from error
    return found


def _dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        return None
    if name not in _DTYPES:
        raise InvalidParameter("dtype", f"must be 'auto' or one of {', '.join(_DTYPES)}, not {dtype!r}")
    return _DTYPES[name]
