"""Times of a request: how long it waited, when its first token came, when its last."""

from __future__ import annotations

from engines import table, table_engine

from headstart.types import Request, SamplingParams


def test_the_first_token_is_timed_from_submit() -> None:
    """With one row the second request waits for the first one's end, and its time to first token says so."""
    engine = table_engine(table(7), None, rows=1)
    params = SamplingParams(max_tokens=12, temperature=0)
    handles = [engine.submit(Request(name, (1, 2, 3), params)) for name in ("a", "b")]
    assert handles[1].sequences[0].tally.stats().first_token_seconds == 0.0
    while not all(handle.done for handle in handles):
        engine.step()
    first, second = (handle.completion().stats for handle in handles)
    for stats in (first, second):
        assert 0 <= stats.waiting_seconds < stats.first_token_seconds
        assert stats.first_token_seconds <= stats.waiting_seconds + stats.seconds
    # It was submitted before the first one started, which ran to its end meanwhile.
    assert second.waiting_seconds >= first.seconds > 0


def test_a_request_that_never_ran_has_no_times() -> None:
    engine = table_engine(table(7), None, rows=1)
    handle = engine.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=4)))
    engine.abort("a")
    stats = handle.completion().stats
    assert (stats.waiting_seconds, stats.first_token_seconds, stats.seconds) == (0.0, 0.0, 0.0)
