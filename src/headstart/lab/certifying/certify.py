"""``certify``: is speculation with this pair lossless here?

Knows: which checks make up a certificate, with which requests, and how long they may take. Does not know: how any of
them is made.

    the same tokens    greedy and coupled answers, alone, together, coming and going, with and without processing, with
                       log-probabilities and grammars, are put through the target again (``audit``)
    the same law       token and block rules: the joint distribution of the first tokens behind a prompt, by a drafter
                       that is often wrong and by the one that serves; and every token along texts (``laws``)
    controls           the same tests on runs that are wrong on purpose
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ...errors import HeadstartError, InvalidParameter, MissingExtra, PromptTooLong
from ...machine.grammar import Grammars
from ...machine.load.loading import eos_ids
from ...types import Grammar, SamplingParams, Structured, Tell, silent
from ..budget import Budget
from ..machine_facts import machine
from ..system import System, SystemOptions
from ..texts import Text, choose, shipped
from .audit import Answer
from .certificate import Certificate
from .checks import Examiner, Given
from .engines import Engines
from .evidence import FIRST, MORE, Plan
from .laws import BRANCHES, FirstTokens, first_tokens, passed, places
from .running import Asked
from .truth import Forwards, truth_of

__all__ = ["SECONDS", "Certifier", "Effort", "certify"]

SECONDS = 85.0  # for the checks of the usual certificate; loading comes on top
COMPANY = 8  # rows that a round of the prompts together runs as, about
GAMMA = 4  # drafted tokens of a round, where the pair's own number is "auto"

PROCESSED: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.6,
    "presence_penalty": 0.4,
    "min_tokens": 4,
}
REWARDED: dict[str, Any] = {  # so that tokens come again, and a wrong count shows
    "repetition_penalty": 1.1,
    "frequency_penalty": -0.5,
    "presence_penalty": -0.4,
    "min_tokens": 4,
}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
_FIELDS = '{"city": {"type": "string"}, "size": {"type": "integer"}}'
SCHEMA = f'{{"type": "object", "properties": {_FIELDS}, "required": ["city", "size"]}}'
TOKENS = 0.4  # of the time for checks of tokens, at the most
LIKE_THE_FIRST = 10  # such checks, about as long as the first one
FEWEST = 3  # prompts of each, however slow the machine is
MOST_PASSES = 8  # answers along which places are looked for
CANDIDATES = 12  # places that are looked at before one is chosen
_FIRST = SamplingParams(max_tokens=4, ignore_eos=True)  # the first comes without a draft, then two are drafted
_WORKED = replace(
    _FIRST, temperature=1.2, top_k=12, repetition_penalty=1.3, frequency_penalty=0.8, presence_penalty=0.5
)
#: rule, settings in words, settings, and how many tokens have cells of their own
STRESSED = (
    ("token", "temperature 0.9", replace(_FIRST, temperature=0.9), BRANCHES),
    ("block", "temperature 0.9", replace(_FIRST, temperature=0.9), BRANCHES),
    ("token", "temperature 1.2, top-k 12, penalties", _WORKED, BRANCHES),
    ("block", "temperature 1.2, top-k 12, penalties", _WORKED, BRANCHES),
)
SERVED = (  # far from 1: a draft that tells another temperature's q must show
    ("token", "temperature 0.6", replace(_FIRST, temperature=0.6), BRANCHES),
    ("block", "temperature 0.5", replace(_FIRST, temperature=0.5), BRANCHES),
)


@dataclass(frozen=True)
class Effort:
    """How much is asked."""

    prompts: int = 6
    longest: int = 40  # tokens of a prompt; the rest is cut off
    tokens: int = 28  # of an answer
    samples: int = 4000  # of a joint distribution, at the most
    texts: int = 24  # sampled of each prompt, at the most
    control: int = 1500  # samples that a control may take


THOROUGH = Effort(prompts=18, longest=256, tokens=64, samples=12_000, texts=40, control=4000)


def certify(
    options: SystemOptions | None = None,
    *,
    prompts: Sequence[Text] | None = None,
    seconds: float | None = SECONDS,
    thorough: bool = False,
    seed: int = 0,
    effort: Effort | None = None,
    tell: Any = None,
) -> Certificate:
    """A certificate of losslessness for a pair of models, as ``options`` open them.

    ``seconds``: for the checks, about; None, or ``thorough``: as long as it takes. ``seed``: another one asks the same
    questions with other noise. ``tell``: hears what is going on.
    """
    given: dict[str, Any] = {"thorough": thorough, "seed": seed, "effort": effort, "tell": tell or silent}
    with Certifier(options or SystemOptions(), prompts, **given) as certifier:
        certifier.run(None if thorough else seconds)
        return certifier.result()


def _fitting(options: SystemOptions) -> SystemOptions:
    """Rows for company, and a draft length that does not depend on what pays: a rule is tested by drafting."""
    if options.gamma == 0:
        raise InvalidParameter("gamma", "is 0, so that nothing would be drafted: there is nothing to certify")
    gamma = GAMMA if options.gamma == "auto" else options.gamma
    return options.changed(gamma=gamma, max_rows=max(options.max_rows, 16), max_model_len=options.max_model_len or 512)


class Certifier:
    """One certificate on its way. ``run`` may be interrupted, and ``result`` tells what was checked by then."""

    def __init__(
        self,
        options: SystemOptions,
        prompts: Sequence[Text] | None = None,
        *,
        thorough: bool = False,
        seed: int = 0,
        effort: Effort | None = None,
        tell: Tell = silent,
    ) -> None:
        options = _fitting(options)
        assert isinstance(options.gamma, int)
        self.effort, self.budget = effort or (THOROUGH if thorough else Effort()), Budget(None)
        self.system = System.open(options, tell)
        try:
            self.engines = Engines(self.system, options.gamma)
            shapes = [Forwards(rows, width) for width in (1, options.gamma + 1) for rows in (1, COMPANY)]
            self.truth = truth_of(self.system.engine, self.system.target, self.system.max_len, shapes)
            self.skipped: list[str] = []
            tests = len(STRESSED) + (len(SERVED) + 1 if self.engines.drafter is not None else 0)
            self.examiner = Examiner(self.engines, self.truth, Plan(tests), tell, seed << 20)
            self._asked_for = self._prompts(prompts)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Certifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.system.close()

    def run(self, seconds: float | None = SECONDS) -> None:
        """Every check. ``seconds``: about; None: as long as it takes."""
        self.budget, prompts = Budget(seconds), self._asked_for
        greedy = self._tokens(prompts)
        self._structured(prompts)
        self._laws(prompts, greedy)

    @property
    def begun(self) -> bool:
        return bool(self.examiner.checks)

    def result(self, *, stopped: bool = False) -> Certificate:
        """The certificate. ``stopped``: checks are missing, as somebody did not want to wait."""
        examiner, plan = self.examiner, self.examiner.plan
        return Certificate(
            machine=machine(),
            settings=self.system.options.told(),
            runs=self.system.facts(),
            reference=self.truth.name,
            exact=self.truth.exact,
            false_alarms=plan.alpha,
            plan={
                "tests": plan.tests,
                "fails_under": plan.at_once,
                "repeated_under": FIRST,
                "times_the_samples": MORE,
                "then_fails_under": plan.second,
            },
            checks=tuple(examiner.checks),
            controls=tuple(examiner.controls),
            skipped=tuple(self.skipped),
            seconds=self.budget.spent,
            complete=not stopped,
        )

    # -- what is asked

    def _prompts(self, texts: Sequence[Text] | None) -> list[tuple[int, ...]]:
        """Half of them twice over, so that there is something to copy."""
        effort, room = self.effort, self.system.max_len - self.effort.tokens - 2 * self.engines.gamma - 8
        if room < 8:
            raise InvalidParameter("max_model_len", f"leaves no room for prompts: {self.system.max_len} tokens")
        most = min(effort.longest, room // 2)
        if self.system.target.tokenizer is None:
            size = self.truth.size
            lines = [[(7 + 13 * i * (n + 3) + n) % size for i in range(8 + 3 * n)] for n in range(effort.prompts)]
        else:
            asked = map(self._ids, choose(shipped() if texts is None else texts))
            lines = list(islice(filter(None, asked), effort.prompts))
            if not lines:
                raise InvalidParameter("prompts", f"are longer than max_model_len ({self.system.max_len}), all of them")
        cut = [line[:most] for line in lines]
        return [tuple(line if n % 2 else [*line, *line[: max(4, len(line) // 2)]]) for n, line in enumerate(cut)]

    def _ids(self, text: Text) -> list[int]:
        """None of a text that is too long to be tokenized, though most of it would be cut off."""
        try:
            return self.system.ids(text)
        except PromptTooLong:
            return []

    def _asked(self, prompts: Sequence[tuple[int, ...]], **settings: Any) -> list[Asked]:
        seeded = "seed" in settings
        return [
            Asked(
                prompt,
                SamplingParams(
                    max_tokens=self.effort.tokens, **settings | ({"seed": settings["seed"] + n} if seeded else {})
                ),
            )
            for n, prompt in enumerate(prompts)
        ]

    def _affordable(self, prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """As many of the prompts as leave time for the tests, by what the first check took."""
        if self.budget.seconds is None:
            return prompts
        most = TOKENS * self.budget.seconds / max(1e-3, LIKE_THE_FIRST * self.examiner.checks[0].seconds)
        few = prompts[: max(FEWEST, int(most * len(prompts)))]
        if len(few) < len(prompts):
            why = "checks of tokens would have taken too long for the others"
            self.skipped.append(f"{len(prompts) - len(few)} of {len(prompts)} prompts: {why} (--seconds, --thorough)")
        return few

    def _tokens(self, prompts: list[tuple[int, ...]]) -> list[Answer]:
        """Greedy and coupled answers in every company; those of plain decoding."""
        examiner = self.examiner
        plain = self._asked(prompts, temperature=0, ignore_eos=True, logprobs=3, speculate=False)
        found = examiner.ids(Given("plain decoding", "greedy", plain), "together", drafts=False)
        examiner.tampered(found, "greedy ids")
        prompts = self._affordable(prompts)
        bias = {prompts[0][-1]: 1.5, prompts[-1][0]: -2.0}
        greedy = Given(
            "greedy ids", "with log-probabilities", self._asked(prompts, temperature=0, ignore_eos=True, logprobs=3)
        )
        worked = Given(
            "greedy ids",
            "penalties, bias, min_tokens",
            self._asked(prompts, temperature=0, logit_bias=bias, **PROCESSED),
        )
        drawn = Given(
            "coupled ids",
            "temperature 0.8",
            self._asked(prompts, temperature=0.8, seed=examiner.seed + 11, ignore_eos=True),
        )
        whole = Given(
            "coupled ids",
            "top-k, top-p, min-p, penalties, bias, min_tokens",
            self._asked(prompts, seed=examiner.seed + 12, logit_bias=bias, **SAMPLED, **REWARDED),
        )
        few = replace(greedy, asked=greedy.asked[: max(2, len(prompts) // 3)])
        examiner.ids(few, "alone")
        for given in (greedy, worked, drawn, whole):
            examiner.ids(given, "together")
        for given in (greedy, whole):
            examiner.ids(given, "coming and going")
        if examiner.engines.backend(self.engines.engine, whole.params) != "tensors":
            by_tensors = self.engines.of(self.engines.drafter, by_tensors=True)
            examiner.ids(replace(whole, asked=whole.asked[:4]), "together", by_tensors)
        return found

    def _structured(self, prompts: list[tuple[int, ...]]) -> None:
        system = self.system
        try:
            width, eos = self.engines.width, eos_ids(system.target)
            if system.target.tokenizer is None:
                raise HeadstartError("the model was given without a tokenizer")
            grammar: Grammar = Grammars(system.target.tokenizer, width=width, eos=eos).compile(Structured(json=SCHEMA))
        except (MissingExtra, HeadstartError) as error:
            self.skipped.append(f"structured output: {error}")
            return
        held = SamplingParams(max_tokens=self.effort.tokens, structured=Structured(json=SCHEMA))
        coupled = replace(held, temperature=0.8, seed=5)
        for name, params in (("greedy ids", replace(held, temperature=0)), ("coupled ids", coupled)):
            asked = [Asked(prompt, params, grammar) for prompt in prompts[:3]]
            self.examiner.ids(Given(name, "held to a JSON schema", asked), "together")

    def _laws(self, prompts: list[tuple[int, ...]], greedy: list[Answer]) -> None:
        """With the drafter that is often wrong, and with the one that serves; rules and settings in turn."""
        examiner, effort = self.examiner, self.effort
        cases = [(STRESSED, False), *([(SERVED, True)] if self.engines.drafter is not None else [])]
        passes = passed(self.truth, greedy[:MOST_PASSES])
        law: FirstTokens | None = None
        left = examiner.plan.tests + 2  # the controls are about as long as two tests
        for settings, own in cases:
            for number, (rule, name, params, branches) in enumerate(settings):
                if law is None or law.params != params:
                    candidates = list(islice(places(passes, params), CANDIDATES))
                    place = examiner.disagreements(candidates, params) if own else candidates[0]
                    law = first_tokens(self.truth, place.tokens, params, branches)
                examiner.first_tokens(law, rule, name, self.budget.part(1 / left), effort.samples, own=own)
                left -= 1
                if (not own and number < 2) or (own and number == 0):
                    examiner.overconfident(law, rule, name, effort.control if not own else effort.control // 3, own=own)
        if self.engines.drafter is not None:
            texts = self._asked(prompts, temperature=1.4, top_k=40, ignore_eos=True)
            examiner.texts(
                Given("along texts", "temperature 1.4, top-k 40", texts),
                "block",
                self.budget.part(1 / left),
                effort.texts,
            )
