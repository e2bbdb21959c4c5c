"""The page of a certificate.

Knows: what a sceptical reader looks for, in which order. Does not know: how anything was checked.
"""

from __future__ import annotations

from ..certifying.certificate import Certificate, Check
from .page import details, facts, html_page, lead, note, section, table

__all__ = ["page", "sentence"]


def sentence(found: Certificate) -> str:
    """What the certificate comes to, in one sentence."""
    held = sum(check.holds for check in found.checks)
    if found.holds:
        return (
            f"It holds: all {held} checks found the target's own output, and the tests rejected every run that was "
            "wrong on purpose."
        )
    if not found.complete:
        return f"It certifies nothing: it was stopped behind {len(found.checks)} checks, of which {held} hold."
    return f"It does not hold: {held} of {len(found.checks)} checks hold."


def page(found: Certificate) -> str:
    """A self-contained page of HTML."""
    ids = [check for check in found.checks if check.p_value is None]
    laws = [check for check in found.checks if check.p_value is not None]
    parts = [
        lead(f"Is speculation with this pair lossless on this machine? {sentence(found)}"),
        *(note(fault, "bad") for fault in found.faults),
        section("What ran", facts({**found.runs, **found.settings})),
        section(
            "What it was held against",
            f"An independent reference: {found.reference}. What a request's settings make of its logits is worked out "
            "anew in float64, apart from the engine and its kernels. Shared with the engine are the weights, the "
            "grammar library's masks, and the noise that a seed stands for.",
            "Every token has to be the very one: the engine's logits are the same bits as the reference's."
            if found.exact
            else "The engine's kernels round otherwise than the reference does: a token that is within rounding of the "
            "best counts as a near-tie. Near-ties are listed.",
        ),
        section("The same tokens", _ids(ids)),
        section("The same distribution", _plan(found), _laws(laws)),
        section("Runs that are wrong on purpose", _controls(found)),
        section("Not checked", *found.skipped) if found.skipped else "",
        details("The machine", facts(found.machine)),
    ]
    return html_page("Certificate of losslessness", [part for part in parts if part])


def _verdict(check: Check) -> str:
    return check.verdict if check.holds else f"{check.verdict}: {'; '.join(check.found)}"


def _wordy(checks: list[Check]) -> tuple[int, ...]:
    """Columns that hold sentences: settings, and verdicts where one is more than a word."""
    return (2,) if all(check.holds for check in checks) else (1, 2)


def _ties(check: Check) -> str:
    widest = f" (up to {check.widest_tie:.2g})" if check.ties else ""
    return f"{check.ties}{widest}" + (f"; {check.by_kernels} by its own kernels" if check.by_kernels else "")


def _ids(checks: list[Check]) -> str:
    rows = [
        (c.name, _verdict(c), c.settings, c.company, c.backend, c.drafter, c.compared, f"{c.accepted} of {c.drafted}",
         c.rejections, c.rows, _ties(c))
        for c in checks
    ]  # fmt: skip
    names = ("check", "verdict", "settings", "company", "decided by", "drafter", "compared", "drafts accepted",
             "rollbacks", "rows", "near-ties")  # fmt: skip
    caption = (
        "Answers are put through the target again, token by token. compared: tokens, and log-probabilities; rollbacks: "
        "rounds in which a draft was rejected; rows: answered in one forward, at the most; near-ties: within rounding "
        "of the likeliest; by its own kernels: beyond that, but right by plain forwards of the engine's own kernels."
    )
    return table(names, rows, caption, text=_wordy(checks))


def _laws(checks: list[Check]) -> str:
    rows = [
        (c.name, _verdict(c), c.settings, c.rule, c.backend, c.drafter, c.compared, f"{c.accepted} of {c.drafted}",
         f"{c.statistic:.1f} ({c.degrees})", f"{c.p_value:.3g}", "" if c.again is None else f"{c.again:.3g}",
         f"{c.detectable:.3f}", ", ".join(f"{float(d):g}: {p:.2f}" for d, p in c.power.items()))
        for c in checks
    ]  # fmt: skip
    names = ("check", "verdict", "settings", "rule", "decided by", "drafter", "samples", "drafts accepted",
             "chi-squared (df)", "p-value", "repeated", "notices", "power by distance")  # fmt: skip
    caption = (
        "first tokens: the joint distribution of the first tokens behind one prompt; the drafter called stress is made "
        "to be often wrong; along texts: every token of sampled texts. notices: any law that is so far from the "
        "target's, in total variation over the cells, fails with probability 0.99 or more; power by distance: the "
        "least probability that a law so far away fails."
    )
    if any(c.excused for c in checks):
        caption += (
            " Numbers are rounded here, so that the engine's kernels, run a token at a time, give another law than the "
            "reference. Twice the distance between the two (chi-squared, up to "
            f"{max(c.excused for c in checks):.2g}) counts as the same; what is noticed allows for it."
        )
    return table(names, rows, caption, text=_wordy(checks))


def _plan(found: Certificate) -> str:
    plan = found.plan
    return (
        f"Stated beforehand: {plan['tests']:g} tests share a false-alarm rate of {found.false_alarms:g}. One fails "
        f"with a p-value under {plan['fails_under']:.2g}. With one under {plan['repeated_under']:g} it is repeated "
        f"with other seeds and {plan['times_the_samples']:g} times the samples, and fails under "
        f"{plan['then_fails_under']:.2g}."
    )


def _controls(found: Certificate) -> str:
    rows = [
        (c.name, ("rejected" if c.rejected else "not rejected") + (f": {c.note}" if c.note else ""), c.what, c.test,
         c.samples, "" if c.p_value is None else f"{c.p_value:.2g}")
        for c in found.controls
    ]  # fmt: skip
    caption = "The same tests on runs with a deliberate fault: a test that cannot fail proves nothing."
    return table(
        ("control", "outcome", "what is wrong", "test", "samples", "p-value"), rows, caption, text=(0, 1, 2, 3)
    )
