"""Text in and out: streams that equal the tokenizer's own decoding, encoding, stop strings."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizer_tools import SHAPES, awkward, byte_fallback, byte_level, shapes, smollm
from tokenizers import pre_tokenizers

from headstart.errors import InvalidParameter
from headstart.machine.text import Detokenizer, StopChecker, TextCodec, TextStream


def streamed(codec: TextCodec, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(codec, prompt)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


# -- detokenising


@shapes
@settings(max_examples=120, deadline=None)
@given(text=awkward, lead=st.sampled_from(["", "The dog", "日本", "dog "]))
def test_stream_equals_decode(shape: str, text: str, lead: str) -> None:
    tokenizer = SHAPES[shape]()
    codec = TextCodec(tokenizer)
    prompt = codec.encode_prediction(lead)
    ids = codec.encode_prediction(text)
    whole = codec.decode(prompt + ids)
    expected = whole[len(codec.decode(prompt)) :]
    pieces = streamed(codec, prompt, ids)
    if "\ufffd" not in expected:  # the common case: nothing false, nothing missing
        assert "".join(pieces) == expected
    else:  # it was in the text, or the vocabulary lacks some byte
        assert "".join(pieces) == expected or "".join(pieces) == expected.rstrip("\ufffd")


@pytest.mark.parametrize("shape", ["smollm", "byte_level"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_stream_as_they_decode(shape: str, data: st.DataObject) -> None:
    """Ids a model could emit, broken UTF-8 and special ids among them: only an unfinished end may be missing."""
    tokenizer = SHAPES[shape]()
    codec = TextCodec(tokenizer)
    single_bytes = [tokenizer.convert_tokens_to_ids(c) for c in pre_tokenizers.ByteLevel.alphabet()]
    some_id = st.one_of(st.sampled_from(single_bytes), st.integers(0, codec.vocab_size - 1))
    ids = data.draw(st.lists(some_id, max_size=120))
    out = "".join(streamed(codec, [], ids))
    whole = codec.decode(ids)
    assert whole.startswith(out)
    assert set(whole[len(out) :]) <= {"\ufffd"}


def test_text_comes_as_soon_as_it_is_settled() -> None:
    codec = TextCodec(byte_level())
    ids = codec.encode_prediction("a😀b")
    assert len(ids) == 6  # the emoji is four tokens of one byte each
    assert streamed(codec, [], ids) == ["a", "", "", "", "😀", "b", ""]


@pytest.mark.parametrize("shape", ["byte_level", "byte_fallback", "in_python"])
def test_unfinished_character_is_dropped(shape: str) -> None:
    codec = TextCodec(SHAPES[shape]())
    ids = codec.encode_prediction("dog😀")
    assert "".join(streamed(codec, [], ids)) == "dog😀"
    assert "".join(streamed(codec, [], ids[:-1])) == "dog"


@pytest.mark.parametrize("text", ["\ufffd", "a\ufffd", "a \ufffd\ufffd\ufffdb", "中\ufffd\ufffd"])
@pytest.mark.parametrize("shape", ["smollm", "byte_level"])
def test_the_real_replacement_character_is_text(shape: str, text: str) -> None:
    codec = TextCodec(SHAPES[shape]())
    assert "".join(streamed(codec, [], codec.encode_prediction(text))) == text


def test_garbage_is_not_held_back_for_ever() -> None:
    tokenizer = byte_level()
    codec = TextCodec(tokenizer)
    continuation = tokenizer.convert_tokens_to_ids("Ģ")  # the byte 0x80, which begins no character
    detokenizer = Detokenizer(codec)
    shown = "".join(detokenizer.push(continuation) for _ in range(500))
    assert 400 < len(shown) < 500
    assert "".join(streamed(codec, [], [continuation] * 500 + codec.encode_prediction("dog"))) == "\ufffd" * 500 + "dog"


@pytest.mark.parametrize("shape", ["byte_fallback", "unigram"])
def test_first_word_keeps_its_space_behind_a_prompt(shape: str) -> None:
    codec = TextCodec(SHAPES[shape]())
    dog = codec.encode_prediction("dog")
    assert "".join(streamed(codec, codec.encode_prediction("The"), dog)) == " dog"
    assert "".join(streamed(codec, [], dog)) == "dog"


def test_special_ids_give_no_text() -> None:
    codec = TextCodec(smollm())
    ids = [1, *codec.encode_prediction("Hello"), 2, 0]
    assert "".join(streamed(codec, [1, 2], ids)) == codec.decode(ids) == "Hello"
    assert codec.vocab_size == 49152
    assert {0, 1, 2} <= codec.special_ids


def test_but_where_they_are_asked_for() -> None:
    codec = TextCodec(smollm())
    ids = [1, *codec.encode_prediction("Hello"), 2, 0]
    stream = TextStream(codec, [1, 2], ["<|im_end|>"], special=True)
    found = [stream.push(token) for token in ids]
    assert "".join(text for text, _ in found) == "<|im_start|>Hello", "a stop string may be one of them"
    assert [stopped for _, stopped in found].index(True) == ids.index(2)
    shown = Detokenizer(codec, special=True)
    assert (
        "".join(map(shown.push, ids)) == codec.decode(ids, special=True) == "<|im_start|>Hello<|im_end|><|endoftext|>"
    )


# -- encoding


def test_encode_is_the_tokenizers_own() -> None:
    codec = TextCodec(byte_fallback())
    assert codec.encode("The dog")[0] == 1  # BOS
    assert codec.encode_prediction("The dog") == codec.encode("The dog")[1:]
    raw = "<|im_start|>user\nHi<|im_end|>\n"
    assert TextCodec(smollm()).encode(raw) == smollm().encode(raw)


@pytest.mark.parametrize("method", ["encode", "encode_prediction"])
@pytest.mark.parametrize("bad", ["a\ud800b", "\udfff", 7, b"bytes", None])
def test_bad_text_is_refused(method: str, bad: object) -> None:
    with pytest.raises(InvalidParameter) as caught:
        getattr(TextCodec(byte_level()), method)(bad)
    assert caught.value.field == ("prompt" if method == "encode" else "prediction")


# -- stop strings


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """By the definition: read on until some stop string is complete, then take the longest such one away."""
    for end in range(len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def in_pieces(checker: StopChecker, pieces: list[str]) -> tuple[str, bool]:
    shown = ""
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown += text
        if stopped:
            return shown, True
    return shown + checker.flush(), False


few = st.text("abc", max_size=4)


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(few, max_size=15), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
def test_text_is_cut_at_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    assert in_pieces(StopChecker(stops), pieces) == cut("".join(pieces), stops)


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(few, max_size=15), stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4))
def test_only_what_may_become_a_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    checker, whole, shown = StopChecker(stops), "", ""
    for piece in pieces:
        text, stopped = checker.push(piece)
        if stopped:
            break
        whole, shown = whole + piece, shown + text
        possible = [n for n in range(len(whole) + 1) if any(s.startswith(whole[len(whole) - n :]) for s in stops)]
        assert shown == whole[: len(whole) - max(possible, default=0)]


def test_nothing_is_shown_after_a_stop() -> None:
    checker = StopChecker(["END"])
    assert checker.push("one E") == ("one ", False)
    assert checker.push("ND two") == ("", True)
    assert checker.push("three") == ("", True)
    assert checker.flush() == ""


def test_text_let_go_is_forgotten() -> None:
    checker = StopChecker(["END"])
    assert checker.push("EN") == ("", False)
    assert checker.flush() == "EN"
    assert checker.push("D END") == ("D ", True)


# -- all together


@pytest.mark.parametrize("shape", ["smollm", "byte_level", "byte_fallback", "in_python"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_stream_is_cut_at_the_first_stop(shape: str, data: st.DataObject) -> None:
    codec = TextCodec(SHAPES[shape]())
    ids = codec.encode_prediction(data.draw(awkward))
    whole = codec.decode(ids)
    assume("\ufffd" not in whole)
    spans = st.tuples(st.integers(0, max(len(whole) - 1, 0)), st.integers(1, 6)).map(
        lambda s: whole[s[0] : s[0] + s[1]]
    )
    stops = data.draw(st.lists(st.one_of(spans, awkward).filter(bool), max_size=3))
    stream = TextStream(codec, [], stops)
    shown, stopped = "", False
    for token in ids:
        piece, stopped = stream.push(token)
        shown += piece
        if stopped:
            break
    if not stopped:
        shown += stream.finish()
    assert (shown, stopped) == cut(whole, stops)


def test_no_stop_before_it_is_allowed() -> None:
    codec = TextCodec(byte_level())
    stream = TextStream(codec, [], ["dog"])
    out = [stream.push(token, check_stop=False) for token in codec.encode_prediction("dog do")]
    out += [stream.push(token) for token in codec.encode_prediction("g dog")]
    assert ("".join(text for text, _ in out), out[-1][1]) == ("dog dog ", True)
