"""How few tokens a text can have is never more than it has; where that cannot be said, nothing is said."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_tools import tiny_llm
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from headstart.errors import PromptTooLong
from headstart.machine.text import TextCodec
from headstart.machine.token_bytes import NFC, TokenBytes


def byte_level(*, without: str = "") -> Tokenizer:
    letters = [each for each in pre_tokenizers.ByteLevel.alphabet() if each not in without]
    names = [*letters, "th", "the", "Ġthe", "ĠĠ", "ĠĠĠĠ"]
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]
    found = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return found


def by_characters(**options: Any) -> Tokenizer:
    names = ["<unk>", "▁", "a", "b", "ab", *(f"<0x{byte:02X}>" for byte in range(256))]
    options = {"byte_fallback": True, "unk_token": "<unk>"} | options
    found = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [("a", "b")], **options))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return found


def composing() -> Tokenizer:
    found = byte_level()
    found.normalizer = normalizers.NFC()
    return found


KNOWN = {
    "bytes": byte_level(),
    "some bytes": byte_level(without="aĆñ"),
    "characters": by_characters(),
    "unknown ones": by_characters(byte_fallback=False),
    "NFC": composing(),
}
TEXTS = st.text(
    st.sampled_from("the  ab\x06\u212ae\u0301\u1100\u1161\u11a8\U00040000\U0001f600") | st.characters(codec="utf-8"),
    max_size=60,
)


@pytest.mark.parametrize("kind", KNOWN)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_it_is_said_to_have(kind: str, text: str) -> None:
    found = TokenBytes.of(KNOWN[kind])
    assert found is not None
    assert found.fewest(text) <= len(KNOWN[kind].encode(text, add_special_tokens=False).ids)


def test_a_text_that_cannot_be_encoded_is_refused_elsewhere() -> None:
    found = TokenBytes.of(KNOWN["bytes"])
    assert found is not None
    assert found.fewest("\ud800" * 8) > 0


def test_long_texts_are_known_to_be_long() -> None:
    for kind, least in (("bytes", 25_000), ("some bytes", 20_000), ("characters", 10_000), ("NFC", 5_000)):
        found = TokenBytes.of(KNOWN[kind])
        assert found is not None
        assert found.fewest("the ab \n" * 12_500) >= least


def altered(**parts: Any) -> Tokenizer:
    found = byte_level()
    for name, part in parts.items():
        setattr(found, name, part)
    return found


def test_where_a_token_may_stand_for_anything_nothing_is_said() -> None:
    eager = byte_level()
    eager.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    cut = byte_level()
    cut.enable_truncation(8)
    for unsure in (
        eager,
        cut,
        altered(normalizer=normalizers.Lowercase()),
        altered(normalizer=normalizers.Replace(Regex(" +"), " ")),
        altered(normalizer=normalizers.Replace("  ", " ")),
        altered(pre_tokenizer=pre_tokenizers.Whitespace()),
        altered(pre_tokenizer=pre_tokenizers.Split(" ", "removed")),
        by_characters(byte_fallback=False, fuse_unk=True),
        by_characters(byte_fallback=False, unk_token=None),
        Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        Tokenizer(models.Unigram([("a", 0.0)], unk_id=0)),
    ):
        assert TokenBytes.of(unsure) is None


def test_what_nfc_makes_of_bytes() -> None:
    """Each character of a decomposed text bears a share of whatever spells it; a composed one never bears more."""

    def size(text: str) -> int:
        return len(text.encode())

    decomposed = {
        char: whole
        for char in map(chr, (*range(0xD800), *range(0xE000, 0x30000)))
        if (whole := unicodedata.normalize("NFD", char)) != char
    }
    share: dict[str, float] = {}
    for char, whole in decomposed.items():
        for part in whole:
            share[part] = max(share.get(part, size(part)), size(char) / len(whole))
    made = {char: whole for char, whole in decomposed.items() if unicodedata.normalize("NFC", char) == char}
    worst = max(sum(share[part] for part in whole) / size(char) for char, whole in made.items())
    worst = max(worst, *(value / size(part) for part, value in share.items()))
    assert 3 <= worst <= NFC


def test_a_prompt_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    monkeypatch.setattr(TextCodec, "_encode_bare", lambda *_: pytest.fail("it was tokenized"))
    monkeypatch.setattr(type(llm.tokenizer), "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    for ask in (
        lambda: llm.generate("a" * 2**16),
        lambda: llm.chat([{"role": "user", "content": "a" * 2**16}]),
        lambda: llm.chat([{"role": "user", "content": "</s>" + "a" * 2**16}]),
    ):
        with pytest.raises(PromptTooLong, match=r"^prompt has \d+ tokens or more; max_model_len is 512 "):
            ask()
