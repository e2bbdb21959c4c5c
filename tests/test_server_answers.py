"""Chunks that are written as JSON at once are those that would have been built."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from headstart.server.answers import Chats, Texts, Writer
from headstart.server.figures import Spelling
from headstart.server.replies import Reply, plain
from headstart.server.streams import event
from headstart.types import Piece, TokenLogprob

TEXTS = ["a", ' "quoted" \\ \n', "\0", "日本\u2028", "é", "</s>"]
ABOUT: dict[str, Any] = {"id": "x-\0", "model": 'a "\0" model', "spelling": Spelling(str), "created": 7}


@pytest.mark.parametrize("kind", [Chats, Texts])
def test_a_text_is_written_as_its_chunk_is(kind: type[Writer]) -> None:
    quick, slow = kind(**ABOUT), kind(**ABOUT)
    for number in (0, 2):
        for text in TEXTS:
            for pieces in ([Piece(text, 5, "plain")], [Piece("", 5, "accepted"), Piece(text, 6, "bonus")]):
                found = quick.text_chunk(number, pieces)
                assert found is not None
                (chunk,) = slow.chunks(number, pieces)
                assert event(found) == event(chunk)


@pytest.mark.parametrize("kind", [Chats, Texts])
def test_what_is_more_than_text_is_built(kind: type[Writer]) -> None:
    piece = Piece("a", 5, "plain")
    assert kind(**ABOUT).text_chunk(0, [piece]) is not None
    assert kind(**ABOUT).text_chunk(0, [Piece("", 5, "plain")]) is None
    assert kind(**ABOUT).text_chunk(0, [piece, Piece("b", 6, "plain", finish_reason="stop")]) is None
    known = Piece("a", 5, "plain", logprob=TokenLogprob(5, -1.0, {}))
    assert kind(**ABOUT, logprobs=True).text_chunk(0, [known]) is None
    assert kind(**ABOUT, origins=True).text_chunk(0, [piece]) is None
    assert kind(**ABOUT, n=2).text_chunk(0, [Piece("a", 5, "plain", 1)]) is None
    if kind is Texts:
        assert Texts(**ABOUT, echo=["so "]).text_chunk(0, [piece]) is None
    else:
        taken_apart = Chats(**ABOUT, reply=lambda _: Reply(plain, frozenset(), None))
        assert taken_apart.text_chunk(0, [piece]) is None
