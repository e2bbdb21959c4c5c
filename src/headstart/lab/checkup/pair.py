"""Does a pair of models fit here, and on what will it run? From headers and tokenizers: no weights are loaded.

Knows: config.json, the headers of safetensors and GGUF files, and what a token's keys and values take. Does not know:
whether torch works.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...errors import HeadstartError, ModelNotFound, ModelRefused
from ...machine.load.gguf_header import FLOATS, is_gguf, read_header
from .looks import gigabytes
from .record import Finding
from .tokens import tokens_differ

__all__ = ["Asked", "Outline", "examined", "outline"]

#: architectures that Headstart's own kernels run (``machine.lower.CLASSES``, which needs torch to be imported)
FUSED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"})
FUSED_GGUF = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})
BYTES = {"int4": 0.59, "int8": 1.07}  # of a weight, with its scales
LONGEST = 8192  # tokens that are served unless more are asked for
SLACK = 1.15  # what else takes memory: buffers, logits, the runtime
ROOMY = 0.6  # of the free memory; a pair that takes more fits, but little is left


@dataclass(frozen=True)
class Asked:
    """A pair, and how it is to run."""

    model: str | None = None  # None: the embedded one
    draft: str | None = "auto"
    quantization: str = "auto"
    draft_quantization: str = "auto"
    dtype: str = "auto"
    rows: int = 8
    max_model_len: int | None = None


@dataclass(frozen=True)
class Outline:
    """A model as its files describe it."""

    name: str
    architecture: str
    parameters: int
    bytes: int  # of its weights on disk
    layers: int
    kv_width: int  # numbers that a token's keys take in a layer; its values take as many
    context: int | None
    vocabulary: int
    own_bits: str | None = None  # of a GGUF file whose weights are quantized: their kind
    fused: bool = False  # Headstart's own kernels run it

    def kind(self, quantization: str, dtype: str, gpu: bool, draft: bool) -> str:
        """In which numbers it would run."""
        if quantization in BYTES:
            return quantization
        if quantization == "auto" and self.own_bits is not None and dtype == "auto" and self.fused and not gpu:
            return self.own_bits
        if quantization == "auto" and draft and self.fused and not gpu:
            return "int8"
        if dtype != "auto":
            return dtype
        return "bfloat16" if gpu or (self.fused and self.own_bits is None) else "float32"

    def weights(self, kind: str, gpu: bool) -> int:
        """Bytes of its weights in such numbers. A CPU's kernels keep floats as they are stored."""
        as_stored = kind == "float32" and self.own_bits is None and self.fused and not gpu
        if as_stored or kind == self.own_bits:
            return self.bytes
        each = BYTES.get(kind, 4.0 if kind == "float32" else 2.0)
        return int(self.parameters * each)

    def keys(self, kind: str, gpu: bool) -> int:
        """Bytes of keys and values of one token."""
        half = gpu or kind in BYTES or kind == self.own_bits
        return 2 * self.layers * self.kv_width * (2 if half and kind != "float32" else 4)


def outline(source: str, *, torch_works: bool = True) -> Outline | str:
    """What the files say; or, in words, why they say nothing."""
    try:
        path = _found(source)
        if path is None:
            return f"{source} is not on this machine: it would be fetched from the hub when it is first used"
        if is_gguf(path):
            return _of_gguf(path)
        if path == Path(source).expanduser():  # of what the hub's cache has, parts may be fetched later
            _check(path, torch_works)
        return _of_folder(path)
    except (ModelNotFound, ModelRefused) as error:  # as loading it would say
        return str(error)
    except (OSError, ValueError, KeyError, TypeError, struct.error, HeadstartError) as error:
        return f"{Path(source).name} cannot be read: {' '.join(str(error).split())[:200] or type(error).__name__}"


def _check(folder: Path, torch_works: bool) -> None:
    """Refuse what loading refuses, in its words where torch works."""
    if torch_works:
        from ...machine.load.faults import check_folder  # here, for it needs torch

        check_folder(folder)
    elif not (folder / "config.json").exists():
        raise FileNotFoundError("it holds no model (no config.json)")


def _found(source: str) -> Path | None:
    path = Path(source).expanduser()
    if path.exists():
        return path
    if source.startswith((".", "/", "~")) or path.suffix == ".gguf":
        raise FileNotFoundError("there is no such folder or file")
    try:
        from ...machine.load.hub import Remote, found_at  # here, for it needs transformers, which may be broken

        return found_at(source, Remote(local_files_only=True))
    except Exception:  # not on this disk, a name that cannot be a hub's, or no such package
        return None


def _of_folder(folder: Path) -> Outline:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    count = size = 0
    for file in sorted(folder.glob("*.safetensors")):
        numbers, held = _weights_in(file)
        count, size = count + numbers, size + held
    if not count:
        raise ValueError("it holds no .safetensors weights (they may have to be fetched)")
    heads = int(text["num_attention_heads"]) if "num_attention_heads" in text else int(text["n_head"])
    width = int(text.get("hidden_size") or text["n_embd"])
    head = int(text.get("head_dim") or width // heads)
    [architecture, *_] = config.get("architectures") or ["unknown"]
    return Outline(
        name=folder.name,
        architecture=str(architecture),
        parameters=count,
        bytes=size,
        layers=int(text.get("num_hidden_layers") or text["n_layer"]),
        kv_width=int(text.get("num_key_value_heads") or heads) * head,
        context=text.get("max_position_embeddings") or text.get("n_positions"),
        vocabulary=int(text.get("vocab_size") or 0),
        fused=architecture in FUSED,
    )


def _weights_in(file: Path) -> tuple[int, int]:
    """Numbers and bytes, by the header of a safetensors file."""
    with file.open("rb") as stream:
        [length] = struct.unpack("<Q", stream.read(8))
        if length > 1 << 28:
            raise ValueError(f"{file.name} is damaged (its header would have {length} bytes)")
        header = json.loads(stream.read(length))
    count = size = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        numbers = 1
        for side in entry["shape"]:
            numbers *= int(side)
        count += numbers
        size += entry["data_offsets"][1] - entry["data_offsets"][0]
    return count, size


def _of_gguf(path: Path) -> Outline:
    header = read_header(path)
    heads = int(header.named("attention.head_count") or 1)
    width = int(header.named("embedding_length") or 0)
    head = int(header.named("attention.key_length") or width // heads)
    return Outline(
        name=path.name,
        architecture=header.architecture,
        parameters=header.numbers,
        bytes=sum(entry.bytes for entry in header.tensors.values()),
        layers=int(header.named("block_count") or 0),
        kv_width=int(header.named("attention.head_count_kv") or heads) * head,
        context=header.named("context_length"),
        vocabulary=int(header.settings.get("tokenizer.ggml.tokens") or 0),
        own_bits=None if header.kind in FLOATS else header.kind,
        fused=header.architecture in FUSED_GGUF,
    )


def examined(
    asked: Asked, free: int | None, gpu: bool, *, torch_works: bool = True
) -> tuple[dict[str, Any], list[Finding]]:
    """What the pair takes, and whether it fits. ``free``: bytes where it would run; ``gpu``: that is a GPU.
    ``torch_works``: else nothing that imports it is asked."""
    found: list[Finding] = []
    facts: dict[str, Any] = {"rows": asked.rows, "device": "GPU" if gpu else "CPU", "free": free}
    total, target = 0, None
    for role, source in (("target", asked.model), ("draft", asked.draft)):
        if source is None or source in ("auto", "lookup", "none", "embedded"):
            continue
        about = outline(source, torch_works=torch_works)
        if isinstance(about, str):
            head = role == "draft" and _is_head(source)
            missing = "is not on this machine" in about
            if not head:
                found.append(Finding(role, "note" if missing else "wrong", about))
            continue
        draft = role == "draft"
        kind = about.kind(asked.draft_quantization if draft else asked.quantization, asked.dtype, gpu, draft)
        longest = asked.max_model_len or min(about.context or LONGEST, LONGEST)
        weights, keys = about.weights(kind, gpu), about.keys(kind, gpu) * longest * asked.rows
        total += weights + keys
        facts[role] = asdict(about) | {"kind": kind, "weights": weights, "keys": keys, "max_model_len": longest}
        found += _one(role, about, kind)
        if draft:
            found.append(_tokens(asked, target, about, torch_works))
            found += [] if target is None else _beside(target, about)
        target = about if not draft else target
    if total:
        found.append(_fits(int(total * SLACK), free, gpu, asked))
        facts["needed"] = int(total * SLACK)
    return facts, found


def _is_head(source: str) -> bool:
    try:
        return "head" in str(
            json.loads((Path(source).expanduser() / "config.json").read_text(encoding="utf-8")).get("model_type")
        )
    except (OSError, ValueError, AttributeError):
        return False


def _one(role: str, about: Outline, kind: str) -> Iterator[Finding]:
    said = f"{about.name}: {about.architecture}, {about.parameters / 1e6:.0f}M weights, runs as {kind}"
    if about.fused:
        yield Finding(role, "fine", f"{said} on Headstart's own kernels")
    else:
        text = f"{said} on torch: Headstart's kernels do not run this architecture"
        yield Finding(role, "slow", text)


def _tokens(asked: Asked, target: Outline | None, draft: Outline, torch_works: bool) -> Finding:
    """Do their token ids mean the same?"""
    advice = "use a draft of the same family, or --draft lookup"
    try:
        differs, why = _compared(asked, torch_works), ""
    except Exception as error:  # a damaged file, a package that is missing: then sizes are all there is
        differs, why = None, " ".join(str(error).split())[:200] or type(error).__name__
    if differs is not None:
        return Finding("pair", "wrong", f"the draft cannot guess for this target: {differs}", advice)
    if not why:
        return Finding("pair", "fine", "target and draft have the same tokens")
    if target and target.vocabulary and draft.vocabulary and abs(target.vocabulary - draft.vocabulary) > 1024:
        sizes = f"{target.vocabulary} and {draft.vocabulary}"
        text = f"target and draft have vocabularies of {sizes} tokens: another tokenizer, perhaps"
        return Finding("pair", "wrong", f"{text} (their tokens were not compared: {why})", advice)
    text = f"the tokens of target and draft were not compared: {why}"
    return Finding("pair", "note", text, "if they differ, loading the pair says so")


def _compared(asked: Asked, torch_works: bool) -> str | None:
    """In what they differ; raises where it cannot be said."""
    if asked.model is None:
        raise LookupError("the target is the embedded model")
    if not torch_works:
        raise LookupError("reading tokenizers needs a torch that works")
    target, draft = _found(asked.model), _found(str(asked.draft))
    if target is None or draft is None:
        raise LookupError("the target is not on this machine")
    return tokens_differ(target, draft)


def _beside(target: Outline, draft: Outline) -> Iterator[Finding]:
    if draft.parameters * 5 > target.parameters:
        ratio = target.parameters / max(draft.parameters, 1)
        text = f"the draft is only {ratio:.1f} times smaller than the target; ten times is usual"
        yield Finding("pair", "slow", text, "headstart advise says whether it pays")


def _fits(needed: int, free: int | None, gpu: bool, asked: Asked) -> Finding:
    where = "GPU memory" if gpu else "memory"
    if free is None:
        return Finding(
            "pair", "note", f"about {gigabytes(needed)} of {where} are needed; how much is free is not known"
        )
    said = f"about {gigabytes(needed)} of {where} are needed, {gigabytes(free)} are free"
    if needed > free:
        return Finding(
            "pair",
            "wrong",
            f"it does not fit: {said}",
            "fewer --rows, a smaller --max-model-len, or --quantization int4",
        )
    if needed > ROOMY * free:
        return Finding("pair", "slow", f"it fits, with little to spare: {said}")
    return Finding("pair", "fine", f"it fits: {said} ({asked.rows} rows)")
