"""What is wrong with a model's files, in one sentence: before they are read, and when reading them failed.

Knows: what a model's folder must hold, and what transformers, tokenizers and safetensors raise.
Does not know: how models are loaded, or which kinds of models can be served (``refusals``).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from textwrap import shorten

from safetensors import SafetensorError, safe_open

from ...errors import HeadstartError, ModelNotFound, ModelRefused
from ..head import head_folder
from .hub import Remote, out_of_reach

__all__ = ["check_folder", "check_snapshot", "explained", "local_path"]

_PICKLE = (
    "{name} has its weights in pickle files, which can run any code when they are read; convert them where you trust "
    "them: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new) writes safetensors"
)
_SETTINGS = ("config.json", "tokenizer.json", ".index.json")  # how files end that hold one JSON object


def local_path(name: str | Path) -> Path | None:
    """The path, if ``name`` is one that is here; None if it can only be a hub id. Raises ModelNotFound."""
    path = Path(name).expanduser()
    try:
        path.stat()
        return path
    except PermissionError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}") from error
    except (OSError, ValueError):
        pass
    if path.suffix == ".gguf":
        raise ModelNotFound(f"there is no file {str(name)!r}: check the path")
    if isinstance(name, Path) or str(name).startswith(("/", "./", "../", "~")) or str(name).count("/") > 1:
        raise ModelNotFound(f"there is no folder {str(name)!r}: check the path")
    return None


def check_folder(path: Path) -> None:
    """Say what is wrong with a folder before transformers does in many more words."""
    try:
        names = os.listdir(path)
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}") from error
    if head_folder(path) is not None:
        raise ModelRefused(
            f"{path} is a draft head, not a model: pass it as draft= (--draft) beside the model it was made for"
        )
    for name in ("config.json", "generation_config.json"):  # transformers passes over the second if it is damaged
        wrong = _wrong_with_json(path / name) if name in names else None
        if wrong is not None:
            raise ModelRefused(f"{path / name} {wrong}")
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


def check_snapshot(name: str | Path, path: Path) -> None:
    """The same of a model from the hub that is to be loaded without it."""
    try:
        check_folder(path)
    except ModelNotFound as error:
        raise ModelNotFound(f"{name} is not whole in this machine's cache, and {_hub()} ({error})") from error


def explained(name: str | Path, error: Exception, remote: Remote, what: str = "") -> HeadstartError:
    """The error of whoever read a model's files, in one sentence. ``what``: the part that was read, "its tokenizer"."""
    text, here = " ".join(str(error).split()), os.path.isdir(Path(name).expanduser())
    short = shorten(text, 300, placeholder=" ...")
    subject = f"{what} in {name}" if what else str(name)
    if "trust_remote_code" in text:
        return ModelRefused(
            f"{name} needs code from its own repository; if you have read it and trust it, pass trust_remote_code=True"
        )
    if "model.safetensors" in text and ("no file" in text or "not appear to have a file" in text):
        return ModelRefused(_PICKLE.format(name=name) + " (or its repository holds no weights at all)")
    if here:
        # A plain ValueError is transformers' own word about a configuration that it could read.
        damaged = None if type(error) is ValueError else _damaged(Path(name).expanduser())
        return ModelRefused(damaged or f"transformers cannot load {subject} ({type(error).__name__}: {short})")
    if isinstance(error, OSError) and remote.offline:
        return ModelNotFound(
            f"no model {str(name)!r}: not a folder here, not in this machine's cache of the hub, and {_hub()}; check "
            "the name and the network, or name a folder"
        )
    if "gated" in text or "401" in text or "403" in text:
        return ModelNotFound(f"{name} cannot be opened: accept its terms on huggingface.co and set HF_TOKEN ({short})")
    if isinstance(error, OSError):
        return ModelNotFound(
            f"no model {str(name)!r}: not a folder here, and not found on the Hugging Face hub ({short})"
        )
    return ModelRefused(f"transformers cannot load {subject} ({type(error).__name__}: {short})")


def _hub() -> str:
    """Why the hub was not asked."""
    reason = out_of_reach()
    return f"the Hugging Face hub cannot be reached ({reason})" if reason else "the hub was not asked for it"


def _damaged(folder: Path) -> str | None:
    """The first file that cannot be read, and why. Asked only when loading failed: readers seldom say which it was."""
    for file in sorted(folder.iterdir()):
        if file.suffix == ".safetensors":
            wrong = _wrong_with_weights(file)
        else:
            wrong = _wrong_with_json(file) if file.name.endswith(_SETTINGS) else None
        if wrong is not None:
            return f"{file} {wrong}"
    return None


def _wrong_with_json(file: Path) -> str | None:
    try:
        return None if isinstance(json.loads(file.read_text(encoding="utf-8")), dict) else "holds no settings"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except (ValueError, RecursionError) as error:
        return f"is damaged, or no JSON at all ({error})"


def _wrong_with_weights(file: Path) -> str | None:
    try:
        with file.open("rb"), safe_open(str(file), framework="pt"):
            return None
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except SafetensorError as error:
        return f"is damaged or cut short ({error}): fetch it again"
