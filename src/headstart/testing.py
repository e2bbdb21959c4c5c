"""Public fakes: small, real or scripted stand-ins that make every part of Headstart testable without a download.

Knows: how to build tiny models from their configs, a table-driven model with known probabilities, a scripted drafter.
Does not know: what is being tested.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from .drafters.base import Drafter
from .machine.kvcache import Slab
from .machine.model_runner import DeviceRunner
from .maths.tree import Topology
from .maths.vocab_ops import PLAIN, VocabOps
from .types import DraftView, Proposal, Verdict

__all__ = [
    "ARCHITECTURES",
    "REFUSED_ARCHITECTURES",
    "TINY_VOCABULARY",
    "TINY_WINDOW",
    "ScriptedDrafter",
    "TableRunner",
    "tiny_model",
    "tiny_tokenizer",
]


# -- tiny Hugging Face models, built from configs ---------------------------------------------------------------

TINY_VOCABULARY = 112
TINY_WINDOW = 8  # keys that sliding layers see, themselves included

_SIZE = {
    "vocab_size": TINY_VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _SIZE | {"num_key_value_heads": 2, "intermediate_size": 64}
_MLP = _SIZE | {"intermediate_size": 64}
_GPT = {
    "vocab_size": TINY_VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"sliding_window": TINY_WINDOW}
_MIXED = _SLIDING | {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_hidden_layers": 3,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

#: name -> (class name in transformers, arguments of its config); every one of them can be served
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _GROUPED),
    "qwen2": ("Qwen2ForCausalLM", _GROUPED),
    "qwen2-mixed": ("Qwen2ForCausalLM", _GROUPED | _MIXED | {"use_sliding_window": True}),
    "qwen3": ("Qwen3ForCausalLM", _GROUPED | {"head_dim": 12}),
    "mistral": ("MistralForCausalLM", _GROUPED | _SLIDING | {"head_dim": 12}),
    "gemma2": ("Gemma2ForCausalLM", _GROUPED | _MIXED | {"head_dim": 12, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3ForCausalLM", _GROUPED | _MIXED | {"head_dim": 12, "query_pre_attn_scalar": 12}),
    "phi3": ("Phi3ForCausalLM", _GROUPED | _SLIDING | {"original_max_position_embeddings": 256}),
    "mixtral": ("MixtralForCausalLM", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2LMHeadModel", _GPT),
    "gpt-neox": ("GPTNeoXForCausalLM", _MLP),
    "gpt-j": ("GPTJForCausalLM", _GPT | {"rotary_dim": 8}),
    "opt": ("OPTForCausalLM", _SIZE | {"ffn_dim": 64, "word_embed_proj_dim": 48, "pad_token_id": 1}),
    "falcon": ("FalconForCausalLM", _SIZE | {"alibi": False, "new_decoder_architecture": False}),
    "cohere": ("CohereForCausalLM", _GROUPED),
    "cohere2": ("Cohere2ForCausalLM", _GROUPED | _MIXED),
    "olmo2": ("Olmo2ForCausalLM", _GROUPED),
    "granite": ("GraniteForCausalLM", _GROUPED),
    "glm4": ("Glm4ForCausalLM", _GROUPED | {"head_dim": 12}),
    "stablelm": ("StableLmForCausalLM", _GROUPED | {"hidden_size": 64}),
    "starcoder2": ("Starcoder2ForCausalLM", _GROUPED | _SLIDING),
    "smollm3": ("SmolLM3ForCausalLM", _GROUPED),
    "qwen3-moe": ("Qwen3MoeForCausalLM", _GROUPED | _EXPERTS | {"head_dim": 12}),
    "gpt-oss": ("GptOssForCausalLM", _GROUPED | _EXPERTS | _SLIDING | {"head_dim": 16, "rope_parameters": _ROPE}),
    "llama4": (
        "Llama4ForCausalLM",
        _GROUPED
        | _EXPERTS
        | {"intermediate_size_mlp": 64, "attention_chunk_size": 8, "head_dim": 12, "num_hidden_layers": 4}
        | {"attn_temperature_tuning": False},
    ),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        _MLP
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
        | {"moe_intermediate_size": 32, "first_k_dense_replace": 1},
    ),
}

#: the same for models that cannot be served, and must be refused in a sentence
REFUSED_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"vocab_size": TINY_VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", {"vocab_size": TINY_VOCABULARY, "d_model": 48, "n_layers": 2, "n_heads": 4}),
    "falcon-alibi": ("FalconForCausalLM", _SIZE | {"alibi": True}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {"vocab_size": TINY_VOCABULARY, "hidden_size": 48, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]], "window_size": TINY_WINDOW, "max_position_embeddings": 256}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "mamba": ("MambaForCausalLM", {"vocab_size": TINY_VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2}),
    "rwkv": (
        "RwkvForCausalLM",
        {"vocab_size": TINY_VOCABULARY, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2},
    ),
    "recurrent-gemma": (
        "RecurrentGemmaForCausalLM",
        _GROUPED | {"lru_width": 48, "attention_window_size": 8, "num_hidden_layers": 3},
    ),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        _GROUPED
        | _EXPERTS
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
        | {"head_dim": 12, "num_hidden_layers": 4, "shared_expert_intermediate_size": 32},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": TINY_VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    ),
}


def tiny_model(
    architecture: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """A small model of a named architecture with random weights, the same for the same arguments.

    The weights are larger than a fresh initialisation's, so that logits differ clearly from token to token
    and a wrong mask or position cannot hide in rounding.
    """
    name, arguments = (ARCHITECTURES | REFUSED_ARCHITECTURES)[architecture]
    model_class = getattr(transformers, name)
    config = model_class.config_class(**arguments | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model.to(dtype).eval()


# -- fakes with known answers -----------------------------------------------------------------------------------


def tiny_tokenizer(size: int = TINY_VOCABULARY, *, shuffle: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of single ASCII characters that fits the tiny models: <s> is 1, </s> is 2, ids from 99 on are spare.

    Another ``shuffle`` gives the same characters other ids: a foreign tokenizer of the same size.
    """
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    shift = shuffle % len(characters)
    names = ["<unk>", "<s>", "</s>", *characters[shift:], *characters[:shift]]
    names += [f"<spare{i}>" for i in range(size - len(names))]
    vocabulary = {name: number for number, name in enumerate(names[:size])}
    text = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    text.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=text,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}",
    )


class TableRunner(DeviceRunner):
    """A language model that is a table: the next token's logits depend on the last two tokens.

    A ``DeviceRunner`` that keeps its tokens as keys in a real slab and looks the earlier one up there, so a wrong row,
    slot, rollback or swap shows as a wrong answer. ``logits`` [V, V, V]: [token before, token, next].
    """

    vocab_ops: VocabOps = PLAIN

    def __init__(self, logits: Tensor, *, rows: int = 4, max_len: int = 64, margin: int = 16) -> None:
        self.table = logits
        self.slab = Slab(rows, max_len, margin=margin)
        self.vocab_size = logits.shape[-1]
        self.device, self.dtype = logits.device, logits.dtype
        self.max_len = max_len
        self.forwards = 0

    def _forward(
        self, rows: slice, tokens: Tensor, lengths: Sequence[int], tree: Topology | None, keep: int | None
    ) -> Tensor:
        self.forwards += 1
        width = tokens.shape[1]
        starts = torch.tensor(lengths)[:, None]
        slots = starts + torch.arange(width)
        self.slab.begin(rows, lengths, width, slots)
        states = tokens[:, None, :, None].double()
        keys, _ = self.slab.update(states, states, 0)  # [R, 1, live, 1]
        held = keys[:, 0, :, 0].long()
        # The token before a node is its parent's; before the first one it is the last live key.
        before = slots - 1 if tree is None else starts + tree.parent
        before = torch.where(torch.arange(width) == 0, starts - 1, before)
        last = torch.where(before >= 0, held.gather(1, before.clamp_min(0)), 0)
        logits = self.table[last, tokens]
        return logits if keep is None else logits[:, width - keep :]

    def device_forward(self, tokens: Tensor, lengths: Tensor, keep: int, bound: int) -> Tensor:
        """See ``DeviceRunner.device_forward``."""
        return self.forward(slice(0, len(tokens)), tokens, lengths.tolist(), keep=keep)

    @property
    def inner(self) -> VocabOps:
        """The name of ``vocab_ops`` before 0.2."""
        warnings.warn("TableRunner.inner is now called vocab_ops", DeprecationWarning, stacklevel=2)
        return self.vocab_ops

    def probabilities(
        self, prompt: Sequence[int], length: int, temperature: float = 1.0
    ) -> dict[tuple[int, ...], float]:
        """The exact law of the next ``length`` tokens after ``prompt``."""
        law: dict[tuple[int, ...], float] = {(): 1.0}
        for _ in range(length):
            longer: dict[tuple[int, ...], float] = {}
            for prefix, mass in law.items():
                text = [0, *prompt, *prefix]
                row = (self.table[text[-2], text[-1]] / temperature).double().softmax(-1).tolist()
                longer.update({(*prefix, token): mass * chance for token, chance in enumerate(row)})
            law = longer
        return law


class ScriptedDrafter(Drafter):
    """Drafts what a function says: ``guess(view, budget) -> Proposal or None``. Remembers what it was told."""

    name = "scripted"

    def __init__(self, guess: Callable[[DraftView, int], Proposal | None], *, free: bool = False) -> None:
        self.guess = guess
        self.free = free
        self.released: list[str] = []
        self.resets = 0
        self.verdicts: list[Verdict | None] = []

    def propose(self, views: Sequence[DraftView], budgets: Sequence[int]) -> list[Proposal | None]:
        return [self.guess(view, budget) if budget else None for view, budget in zip(views, budgets, strict=True)]

    def commit(self, views: Sequence[DraftView], verdicts: Sequence[Verdict | None]) -> None:
        self.verdicts.extend(verdicts)

    def release(self, sequence_id: str) -> None:
        self.released.append(sequence_id)

    def reset(self) -> None:
        self.resets += 1
