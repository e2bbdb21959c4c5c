"""What a visit to a lent GPU machine measures: in which calls, with which limits, and which results come back.

Knows: the benchmarks and their options, what they take there, and of which pieces each result is made. Does not know:
how anything travels or is run (``gpu_visit.py``).

Half an hour in all: 60 to 90 s to start the machine, some seconds of transfer for each call, calls of ten minutes at
most.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CALLS", "PIECES", "WEIGHTS", "Call", "Part"]

WEIGHTS = "{weights}"


@dataclass(frozen=True)
class Part:
    """One benchmark. ``{seconds}`` in its command: the limit less ``ending``, the time it takes to come to its end."""

    script: str
    arguments: str
    seconds: float
    ending: float
    quick: str  # what is said behind it with --quick: there the last word counts

    @property
    def needs_weights(self) -> bool:
        return WEIGHTS in self.arguments


@dataclass(frozen=True)
class Call:
    seconds: int
    parts: tuple[Part, ...] = ()


def planted(arguments: str, seconds: float) -> Part:
    told = f"--device cuda {arguments} --go-on --limit {{seconds}}"
    return Part("lab_planted.py", told, seconds, 6, "--device cpu --only tensors --bug none --jobs 1")


def certify(arguments: str, seconds: float) -> Part:
    told = f"--device cuda --weights {WEIGHTS} {arguments} --seconds 20 --go-on --limit {{seconds}}"
    return Part("lab_certify.py", told, seconds, 6, "--device cpu --only lookup --seconds 4 --jobs 2")


# In order of what matters. A turn of never_slower takes 33 s (nine of them 300 s), its engines 90 s with all imports; a
# pair of lab_advise its 60 s and about 10 to open; a certificate about 60 s beside its checks; one of a planted bug 110
# to 160 s, six at a time on three cores. All in all about 1,500 s are expected; the limits leave more room than that.
CALLS = {
    "slower": Call(
        595,
        (
            Part(
                "never_slower.py",
                f"--device cuda --weights {WEIGHTS} --ids {{ids}} --turns 9 --batches 1 8 32 --go-on "
                "--seconds {seconds}",
                475,
                50,
                "--quick --device cpu --turns 1 --tokens 16 --batches 1 2",
            ),
            certify('--only "int8 target, int8 draft model" lookup --jobs 2', 200),
        ),
    ),
    "certify": Call(480, (certify("--jobs 7", 220), planted("--jobs 6", 460))),
    "advise": Call(
        570,
        (
            Part(
                "lab_advise.py",
                f"--device cuda --weights {WEIGHTS} --ids {{ids}} --drafts third small --alphas 0.9 0.6 0.75 "
                "--batches 1 8 32 --tokens 96 --pair-seconds 60 --go-on --seconds {seconds}",
                550,
                130,
                "--quick --device cpu --seconds 60",
            ),
        ),
    ),
}

PIECES = {  # results, and the pieces of which each has the more the better
    "never-slower-gpu-llama-3-8b.json": ("slower", ("draft", "temperature", "batch"), "turns"),
    "lab-advise-gpu-llama-3-8b.json": ("pairs", ("name",), None),
    "certify-cuda.json": ("runs", ("case",), None),
    "certify-planted-cuda.json": ("runs", ("bug", "implementation"), None),
}
