"""Tokenizers of several shapes, and text that is awkward for them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from headstart.machine.load.embedded import embedded_folder

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps in the sun, and the fox runs home.",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
    "Où est la bibliothèque ? Les élèves étudient là-bas. 日本語のテキスト。中文文本。 Текст на русском.",
] * 3


@cache
def smollm() -> Any:
    """The embedded model's tokenizer: byte-level BPE, 49k entries."""
    return AutoTokenizer.from_pretrained(embedded_folder())


@cache
def byte_level() -> Any:
    """A small byte-level BPE, with tokens that end inside a character, and added tokens of every kind."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|end|>", special=True, rstrip=True)])
    tokenizer.add_tokens(["<think>", "</think>", "<tool>"])  # added, but not special
    tokenizer.chat_template = CHATML
    return tokenizer


@cache
def byte_fallback() -> Any:
    """Llama 2's shape: SentencePiece BPE with Metaspace words, and byte tokens for unknown characters."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    control = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    latin = [text for text in CORPUS if text.isascii()]  # so that everything else needs byte tokens
    backend.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=450, special_tokens=control + bytes_))
    spec = json.loads(backend.to_str())
    spec["model"]["byte_fallback"] = True
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in control]
    backend = Tokenizer.from_str(json.dumps(spec))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def unigram() -> Any:
    """SentencePiece's other shape: Unigram, Metaspace, and control tokens that the model itself can find in text."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=list("</s>"),
        max_piece_length=8,
    )
    backend.train_from_iterator([*CORPUS, "a < b / s > c </ s> s"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    return tokenizer


@cache
def in_python() -> Any:
    """A tokenizer without a Rust backend: bytes, which it decodes by leaving out what is incomplete."""
    tokenizer = ByT5Tokenizer(extra_ids=0)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
    return tokenizer


SHAPES = {
    "smollm": smollm,
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "unigram": unigram,
    "in_python": in_python,
}
shapes = pytest.mark.parametrize("shape", SHAPES)

#: characters of one to four bytes, combining marks, joiners, and what tokenizers treat in their own way
awkward = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.sampled_from("e\u0301e\u0308 \u200d😀👩\u200d👩\u200d👧🇫🇷🏽中日本語हिन्दी\ufe0f▁Ġ\n\t <|>/s"),
    )
)


def says(*contents: str) -> list[dict[str, str]]:
    """A chat in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
