"""The tokenizer of a GGUF file, and the tokens that end an answer of its model.

Knows: what llama.cpp's converter writes about tokens, and what transformers does not take from it. Does not know:
weights, or how text is encoded.

Three things in a header mean something that transformers 5.17 passes over. A vocabulary is filled up to the size of the
embedding with "[PAD151936]" and the like, which no text has: with them, two sizes of one family seem to have different
tokenizers. ``add_bos_token`` asks for a first token before a raw prompt. And a chat model's turns may end with another
token than its texts: llama.cpp stops at either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from .gguf_header import Header, gguf_parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["end_turns", "tokenizer_in"]

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_ENDS_OF_TURNS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
#: byte-level vocabularies (``tokenizer.ggml.pre``) that begin with a first token, unless a header says otherwise
_BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")


def tokenizer_in(path: Path, header: Header, config: Any) -> PreTrainedTokenizerBase:
    """The file's tokenizer, without the tokens that only fill up its vocabulary. ``config``: the model's, which knows
    its special tokens."""
    first = gguf_parts(path)[0]
    # Not AutoTokenizer: it reads the whole header once more, only to learn that it needs this class.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(
        str(first.parent), gguf_file=first.name, trust_remote_code=False
    )
    for name in ("bos_token", "eos_token"):  # transformers 5.17 mixes them up; the header has them right
        number = getattr(config, f"{name}_id", None)
        if isinstance(number, int):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    tokenizer = _cut(tokenizer, _real(tokenizer, header))
    tokenizer.clean_up_tokenization_spaces = False  # decoding must give back what was encoded
    if _begins(header) and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True
    return tokenizer


def end_turns(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, header: Header) -> None:
    """Let answers end where llama.cpp ends them: where a turn of a chat ends, too."""
    settings = model.generation_config
    if settings is None:
        return
    known = settings.eos_token_id
    ends = {known} if isinstance(known, int) else set(known or ())
    named = (header.settings.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends |= {number for number in named if isinstance(number, int)}
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends |= {special[text] for text in _ENDS_OF_TURNS if text in special}
    if len(ends) > 1:
        settings.eos_token_id = sorted(ends)


def _begins(header: Header) -> bool:
    """Does a text begin with a token of its own?"""
    said = header.settings.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    if header.settings.get("tokenizer.ggml.model") == "llama":
        return True
    return header.settings.get("tokenizer.ggml.pre") in _BEGUN


def _real(tokenizer: Any, header: Header) -> int:
    """How many tokens the file has, without those that fill its vocabulary up, each named by its own number."""
    count = header.settings.get("tokenizer.ggml.tokens")
    if not isinstance(count, int):
        return len(tokenizer)
    special = tokenizer.added_tokens_decoder
    names = {number: text for text, number in tokenizer.get_vocab().items()}
    while count and names.get(count - 1) == f"[PAD{count - 1}]" and count - 1 not in special:
        count -= 1
    return count


def _cut(tokenizer: PreTrainedTokenizerFast, count: int) -> PreTrainedTokenizerFast:
    """The tokenizer with so many tokens. transformers 5.17 adds some of its own: <|endoftext|>, where there is none."""
    if max(tokenizer.get_vocab().values(), default=-1) < count:
        return tokenizer
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = whole["model"]["vocab"]
    if not isinstance(vocabulary, dict):  # Unigram: of its filling transformers makes what it needs
        return tokenizer
    whole["model"]["vocab"] = kept = {text: number for text, number in vocabulary.items() if number < count}
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < count]
    known = kept.keys() | {token["content"] for token in whole["added_tokens"]}
    named = {name: getattr(tokenizer, name) for name in _NAMED}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(whole)),
        chat_template=tokenizer.chat_template,
        **{name: text for name, text in named.items() if text in known},
    )
