"""GGUF files as models: their configuration, their tensors under our names, their tokenizer; or all of it spelt out.

Knows: what an architecture's settings and tensors are called in GGUF, and how its rows are ordered there.
Does not know: the file format (``gguf_header``), what its tokens mean (``gguf_tokenizer``), how weights are packed or
run, or who asks.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ...errors import HeadstartError, ModelRefused
from ...types import Tell, silent
from ..stored import OpenFile, Rows, Stored
from .gguf_header import Entry, Header, gguf_parts, read_header
from .gguf_tokenizer import end_turns, tokenizer_in
from .quiet import quiet
from .refusals import model_class, refusals, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_all_read", "empty_model", "mapped", "read_gguf", "read_tokenizer", "rope_factors"]

# Architectures for which transformers' own reader is not asked: it takes half a minute for a large vocabulary.
_SETTINGS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "vocab_size": "vocab_size",
}
_OWN = {
    "llama": {"rope.dimension_count": "head_dim"},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"attention.sliding_window": "sliding_window"},
}
_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "unknown": "unk_token_id", "padding": "pad_token_id"}
_INTERLEAVED = ("llama",)  # architectures whose rotary pairs lie side by side
_ROPE_FACTORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # by which frequencies are divided, in longrope
_NO_WEIGHTS = re.compile(r"(blk\.\d+\.)?(rope_freqs|rope_factors_short|rope_factors_long|attn_rot_embd)\.weight")
_NO_TOKENIZER = ("none", "no_vocab")
# Biases that some models of an architecture have and others have not, and the setting that says so.
_BIASES = {
    "attention_bias": (("llama", "qwen3"), ("attn_q", "attn_k", "attn_v", "attn_output")),
    "mlp_bias": (("llama",), ("ffn_gate", "ffn_up", "ffn_down")),
}


def read_gguf(
    path: Path, dtype: torch.dtype | None = None, tell: Tell = silent
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Read a GGUF file into an ordinary model. Quantized weights become ordinary numbers again (``dtype``, float32)."""
    header = read_header(path)
    with _in_one_sentence(path):
        return _spelt_out(path, header, dtype or torch.float32, tell)


def empty_model(path: Path, header: Header, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model that the file describes, without memory for its weights. Raises ModelRefused, in one sentence."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with _in_one_sentence(path):
        settings = _settings(path, header)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        refuse(refusals(config, model_class(config)))
        model: PreTrainedModel
        with torch.device("meta"):  # a damaged number may ask for more memory than there is
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        if model.num_parameters() > 2 * header.numbers:
            raise ModelRefused(
                f"{path} is damaged: it describes a model of {model.num_parameters()} weights and has {header.numbers}"
            )
    return model


def read_tokenizer(path: Path, header: Header, model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The file's tokenizer; None if it has none. The model, which knows its special tokens, is told which of them end
    an answer."""
    known = header.settings
    if "tokenizer.ggml.tokens" not in known or known.get("tokenizer.ggml.model") in _NO_TOKENIZER:
        return None
    with _in_one_sentence(path, "{}'s tokenizer cannot be read", "; pass tokenizer= to use another"):
        tokenizer = tokenizer_in(path, header, model.config)
        end_turns(model, tokenizer, header)
    return tokenizer


def mapped(header: Header) -> dict[str, Stored]:
    """All tensors of a file, where they lie in it; with the order of their rows where that is not Hugging Face's. Zeros
    for biases that only some parts of the model have."""
    files = {file: OpenFile(file) for file in {entry.file for entry in header.tensors.values()}}
    found = {name: _stored(entry, files[entry.file], header) for name, entry in header.tensors.items()}
    for parts in _biased(header).values():
        for name, entry in header.tensors.items():
            whole, _, sort = name.rpartition(".")
            if sort == "weight" and whole.rpartition(".")[2] in parts and f"{whole}.bias" not in found:
                length = entry.shape[0]
                found[f"{whole}.bias"] = Stored("F32", (length,), np.zeros(4 * length, dtype=np.uint8))
    return found


def rope_factors(header: Header, name: str = _ROPE_FACTORS) -> torch.Tensor | None:
    """By what each frequency of the rotation is divided (Llama 3.1 and later); None: by nothing."""
    entry = header.tensors.get(name)
    if entry is None:
        return None
    if entry.kind != "F32":
        raise ModelRefused(f"{entry.file} has {name} in {entry.kind}, which is not read here: convert it again")
    return torch.from_numpy(OpenFile(entry.file).read(entry.at, entry.bytes)).view(torch.float32)


def check_all_read(path: Path, header: Header, unread: Iterable[str]) -> None:
    """Refuse a file of which something was left over, as llama.cpp does: without it, it is another model."""
    if header.architecture not in _OWN:
        return  # transformers' own readers take some tensors under other names
    left = sorted(name for name in unread if not _NO_WEIGHTS.fullmatch(name))
    if left:
        raise ModelRefused(
            f"{path} has {len(left)} tensors that are not read as parts of a {header.architecture} model, such as "
            f"{left[0]!r}: it is damaged, or a kind of model that is not known here"
        )


@contextmanager
def _in_one_sentence(path: Path, what: str = "{} cannot be read as a model", advice: str = "") -> Iterator[None]:
    """Whatever a file does to its readers, whose errors have no one type, is a ModelRefused; and nothing is printed."""
    try:
        with quiet():
            yield
    except (HeadstartError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise ModelRefused(f"{what.format(path)} ({type(error).__name__}: {text}){advice}") from error


# -- names and orders ---------------------------------------------------------------------------------------------


def _settings(path: Path, header: Header) -> dict[str, Any]:
    """The arguments of the model's configuration."""
    architecture, known = header.architecture, header.settings
    tied = "output.weight" not in header.tensors
    if architecture not in _OWN or known.get("general.name") == "mistral":
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        with redirect_stderr(io.StringIO()):  # the reader draws a bar that cannot be switched off
            settings = dict(load_gguf_checkpoint(str(gguf_parts(path)[0]))["config"])
        if len(gguf_parts(path)) > 1 and architecture not in ("falcon", "bloom"):  # it saw one part's tensors only
            settings["tie_word_embeddings"] = tied
        if architecture in _OWN and header.named("attention.key_length"):
            settings["head_dim"] = header.named("attention.key_length")
        return settings
    settings = {"model_type": architecture, "tie_word_embeddings": tied}
    if "general.name" in known:
        settings["_model_name_or_path"] = known["general.name"]
    for theirs, ours in (_OWN[architecture] | _SETTINGS).items():
        if header.named(theirs) is not None:
            settings[ours] = header.named(theirs)
    for theirs, ours in _TOKENS.items():
        if f"tokenizer.ggml.{theirs}_token_id" in known:
            settings[ours] = known[f"tokenizer.ggml.{theirs}_token_id"]
    table = header.tensors.get("token_embd.weight")
    if table is not None:  # as llama.cpp: the setting is only a note
        settings["vocab_size"] = table.shape[0]
    return settings | dict.fromkeys(_biased(header), True) | _rotation(path, header)


def _biased(header: Header) -> dict[str, tuple[str, ...]]:
    """Settings that say that the model has biases, and the parts that have them then."""
    there = {name.rpartition(".")[0].rpartition(".")[2] for name in header.tensors if name.endswith(".bias")}
    return {
        setting: parts
        for setting, (architectures, parts) in _BIASES.items()
        if header.architecture in architectures and there.intersection(parts)
    }


def _rotation(path: Path, header: Header) -> dict[str, Any]:
    """The settings of how heads are turned: which of their channels, and how fast."""
    found: dict[str, Any] = {}
    heads, width, turning = map(header.named, ("attention.head_count", "embedding_length", "rope.dimension_count"))
    head_dim = header.named("attention.key_length") or (turning if header.architecture == "llama" else None)
    if head_dim is None and isinstance(heads, int) and isinstance(width, int) and heads:
        head_dim = width // heads
    if turning and head_dim and turning != head_dim:
        if header.architecture != "phi3":
            raise ModelRefused(
                f"{path} turns {turning} of the {head_dim} channels of each head; {header.architecture} models are "
                "known here only with all of them turned"
            )
        found["partial_rotary_factor"] = turning / head_dim
    kind, factor = header.named("rope.scaling.type"), header.named("rope.scaling.factor")
    if kind is None and header.named("rope.scale_linear"):  # what files had before there were several kinds
        kind, factor = "linear", header.named("rope.scale_linear")
    original = header.named("rope.scaling.original_context_length")
    more = {"original_max_position_embeddings": original} if original else {}
    short, long = rope_factors(header, _SHORT), rope_factors(header, _LONG)
    if short is not None and long is not None:
        found["rope_scaling"] = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
        if (scale := header.named("rope.scaling.attn_factor")) is not None:
            found["rope_scaling"]["attention_factor"] = scale
        found |= more  # where Phi3's configuration has it
        found["rope_scaling"] |= more
    elif kind in ("linear", "yarn"):
        if factor:
            found["rope_scaling"] = {"rope_type": kind, "factor": factor} | more
    elif kind not in (None, "none"):
        raise ModelRefused(f"{path} scales its rotation in a way that is not known here: {kind!r}")
    return found


def _stored(entry: Entry, file: OpenFile, header: Header) -> Stored:
    order = None
    part = entry.name.rpartition(".")[0].rpartition(".")[2]
    if header.architecture in _INTERLEAVED and part in ("attn_q", "attn_k"):
        heads = header.named("attention.head_count" if part == "attn_q" else "attention.head_count_kv")
        heads = heads or header.named("attention.head_count")
        if isinstance(heads, int) and heads and entry.shape[0] % (2 * heads) == 0:
            order = _halves(entry.shape[0], heads)
    return Stored(entry.kind, entry.shape, None, order, file, entry.at, entry.bytes)


def _halves(rows: int, heads: int) -> Rows:
    """llama.cpp keeps the two halves of each rotary pair side by side; Hugging Face keeps them half a head apart."""
    return np.arange(rows, dtype=np.int32).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


# -- spelt out ----------------------------------------------------------------------------------------------------


class _NothingRandom(TorchFunctionMode):
    """Weights are not drawn at random, which takes longer than reading them: each of them is read, or missed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.uniform_, torch.Tensor.normal_):
            return args[0]
        return func(*args, **(kwargs or {}))


def _spelt_out(
    path: Path, header: Header, dtype: torch.dtype, tell: Tell
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    config = empty_model(path, header, dtype).config
    # Not from_pretrained(gguf_file=...), which wants the package accelerate for this, and does not know parts.
    with _NothingRandom():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    found: dict[str, dict[str, torch.Tensor]] = {"tensors": {}}  # what a processor makes of several tensors
    names, state, there = get_gguf_hf_weights_map(model, processor), model.state_dict(), set()
    unread, taken = set(header.tensors), 0
    for name, stored in mapped(header).items():
        lines = stored.bytes.reshape(*stored.shape[:-1], -1)
        weights = dequantize(lines, GGMLQuantizationType[stored.kind])
        done = processor.process(weights=weights, name=name, tensor_key_mapping=names, parsed_parameters=found)
        place = state.get(names.get(done.name, ""))
        if place is not None:
            if place.shape != done.weights.shape:
                raise ModelRefused(
                    f"{path} is damaged: {name} is {list(done.weights.shape)} where {list(place.shape)} belongs"
                )
            place.copy_(torch.from_numpy(np.array(done.weights)))  # each at once: no second model in memory
            there.add(names[done.name])
            unread.discard(name)
        taken += header.tensors[name].numbers if name in header.tensors else 0
        tell(f"loading {path.name} as {str(dtype).removeprefix('torch.')}: {taken / header.numbers:.0%}")
    check_all_read(path, header, unread)
    missing, _ = model.load_state_dict(found["tensors"], strict=False)
    model.tie_weights()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    lost = [name for name in missing if name not in tied and name not in there]
    if lost:
        raise ModelRefused(f"{path.name} lacks weights that {type(model).__name__} needs, such as {lost[0]}")
    factors, rotary = rope_factors(header), getattr(getattr(model, "model", None), "rotary_emb", None)
    if factors is not None and rotary is not None:
        rotary.inv_freq /= factors.to(rotary.inv_freq)
    return model, read_tokenizer(path, header, model)
