"""A model's name -> the model, its tokenizer, and a report of what it can and cannot do, and why.

Knows: where models come from (a folder, the hub, a GGUF file, a live object) and which kinds cannot be served.
Does not know: how a model is run, or the embedded default.

Weights are read from safetensors or GGUF only. Pickle runs code when it is read, so it is refused.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerFast
from transformers.utils import cached_file
from transformers.utils import logging as hf_logging

from ..errors import InvalidParameter, MissingExtra, ModelNotFound, ModelRefused
from .refusals import model_class, refusals, refuse
from .runner import attention_kinds, context_limit

if TYPE_CHECKING:  # what makes models takes seconds to import, and a model whose weights lie packed needs none of it
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Capability",
    "Loaded",
    "architecture",
    "capability",
    "device_for",
    "eos_ids",
    "fetch_tokenizer",
    "found_at",
    "load",
    "quiet",
    "read_gguf",
    "same_tokenizer",
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
) -> Loaded:
    """Load a model from a folder, a ``.gguf`` file or the Hugging Face hub, or take a live one as it is.

    ``dtype="auto"`` is the checkpoint's on a GPU and float32 on the CPU; ``device`` defaults to the GPU if there is
    one. ``token`` (or HF_TOKEN) opens gated repositories. Raises ``ModelRefused`` or ``ModelNotFound``.
    """
    wanted, place = _dtype(dtype), device_for(device)
    remote = {"revision": revision, "token": token, "local_files_only": local_files_only}
    if trust_remote_code:
        warnings.warn("trust_remote_code is on: code from the model's repository will run here", stacklevel=2)
        remote["trust_remote_code"] = True
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
        ready, own = _fetch(model, wanted, device_map, remote)
        if device_map is None:
            ready = ready.to(place)
    if isinstance(tokenizer, (str, Path)):
        own = fetch_tokenizer(str(tokenizer), remote)
    elif tokenizer is not None:
        own = tokenizer
    report = capability(ready, own)
    refuse(report.reasons)
    return Loaded(ready.eval(), own, report)


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


def architecture(name: str | Path, revision: str | None = None) -> str | None:
    """The class that a model's own files name. None if that is not known without fetching them."""
    try:
        place = found_at(name, revision=revision, local_files_only=True)
        named = json.loads((place / "config.json").read_text()).get("architectures")
    except (OSError, ValueError):
        return None
    return str(named[0]) if named else None


def found_at(name: str | Path, **hub: Any) -> Path:
    """The folder or file that a model is named by; of one on the hub the snapshot, which is fetched unless ``hub`` says
    otherwise. Raises OSError or ValueError."""
    path = Path(name).expanduser()
    return path if path.exists() else Path(str(cached_file(str(name), "config.json", **hub))).parent


def same_tokenizer(a: Loaded, b: Loaded) -> str | None:
    """Why b's token ids do not mean what a's mean, or None when they do. Without tokenizers, sizes are compared."""
    if a.tokenizer is None or b.tokenizer is None:
        if a.report.vocab_size == b.report.vocab_size:
            return None
        return f"their vocabularies have {a.report.vocab_size} and {b.report.vocab_size} tokens"
    mine, other = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
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


def read_gguf(path: Path, dtype: torch.dtype | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read a GGUF file into an ordinary model. Quantized weights become ordinary numbers again (``dtype``, float32)."""
    if find_spec("gguf") is None:
        raise MissingExtra("gguf", "gguf")
    # Not from_pretrained(gguf_file=...), which wants the package accelerate for this; the reader itself does not.
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with quiet(), redirect_stderr(io.StringIO()):  # the reader draws a bar that cannot be switched off
        settings = dict(load_gguf_checkpoint(str(path))["config"])
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        refuse(refusals(config, model_class(config)))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32)
        weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        missing, _ = model.load_state_dict(weights, strict=False)
        model.tie_weights()
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        lost = [name for name in missing if name not in tied]
        if lost:
            raise ModelRefused(f"{path.name} lacks weights that {type(model).__name__} needs, such as {lost[0]}")
        # Not AutoTokenizer: it reads the whole header once more, only to learn that it needs this class.
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was encoded
    for name in ("bos_token", "eos_token"):  # transformers 5.17 mixes them up; the header has them right
        number = getattr(config, f"{name}_id", None)
        if isinstance(number, int):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    return model, tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars: reading local weights takes seconds, and their bars would cut through a program's output."""
    shown, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if shown:
            hf_logging.enable_progress_bar()


# -- where it comes from ------------------------------------------------------------------------------------------


def _fetch(
    name: str | Path, dtype: torch.dtype | None, device_map: Any, remote: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}")
        return read_gguf(path, dtype)
    if device_map is not None and find_spec("accelerate") is None:
        raise MissingExtra("accelerate", "placement")
    if path.is_dir():
        _check_folder(path)
        with quiet():
            return _pretrained(str(path), dtype, device_map, remote), fetch_tokenizer(str(path), remote)
    if isinstance(name, Path) or str(name).startswith(("/", "./", "../", "~")) or str(name).count("/") > 1:
        raise ModelNotFound(f"there is no folder {path}")
    return _pretrained(str(name), dtype, device_map, remote), fetch_tokenizer(str(name), remote)


def _check_folder(path: Path) -> None:
    """Say what is wrong with a folder before transformers does in many more words."""
    names = os.listdir(path)
    if "adapter_config.json" in names and "config.json" not in names:
        raise ModelRefused(
            f"{path} is an adapter, not a model: merge it into its base model first (peft merge_and_unload)"
        )
    if "config.json" not in names:
        gguf = next((name for name in sorted(names) if name.endswith(".gguf")), None)
        hint = f"; to use the GGUF file in it, name {path / gguf}" if gguf else ""
        raise ModelNotFound(f"{path} holds no model (no config.json){hint}")
    if not any(name.endswith(".safetensors") for name in names):
        if any(name.endswith((".bin", ".pt", ".pth", ".ckpt")) for name in names):
            raise ModelRefused(_PICKLE.format(name=path))
        raise ModelNotFound(f"{path} holds no weights (no .safetensors file)")


_PICKLE = (
    "{name} has its weights in pickle files, which can run any code when they are read; convert them where you trust "
    "them: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new) writes safetensors"
)


def _pretrained(name: str, dtype: torch.dtype | None, device_map: Any, remote: dict[str, Any]) -> PreTrainedModel:
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name, **remote)
        refuse(refusals(config, model_class(config)))  # before gigabytes are read
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype or "auto", device_map=device_map, use_safetensors=True, **remote
        )
    except (OSError, ValueError) as error:
        raise _explained(name, error) from error
    return model


def _explained(name: str, error: Exception) -> Exception:
    """transformers' error in one sentence, as the fault it is."""
    text = " ".join(str(error).split())
    if "model.safetensors" in text and ("no file" in text or "not appear to have a file" in text):
        return ModelRefused(_PICKLE.format(name=name) + " (or its repository holds no weights at all)")
    if "trust_remote_code" in text:
        return ModelRefused(
            f"{name} needs code from its own repository; if you have read it and trust it, pass trust_remote_code=True"
        )
    if "gated" in text or "401" in text or "403" in text:
        return ModelNotFound(
            f"{name} cannot be opened: accept its terms on huggingface.co and set HF_TOKEN ({text[:200]})"
        )
    if isinstance(error, OSError):
        return ModelNotFound(
            f"no model {name!r}: not a folder here, and not found on the Hugging Face hub ({text[:200]})"
        )
    return ModelRefused(f"transformers cannot load {name}: {text[:300]}")


def fetch_tokenizer(name: str, remote: dict[str, Any]) -> PreTrainedTokenizerBase | None:
    path = Path(name)
    if path.is_dir() and not any((path / file).exists() for file in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **remote)
    except (OSError, ValueError) as error:
        if path.is_dir():
            raise ModelRefused(
                f"the tokenizer in {name} cannot be read: {' '.join(str(error).split())[:300]}"
            ) from error
        return None  # a hub repository without one; the report says so
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
