"""Headstart: lossless speculative decoding for any Hugging Face causal language model.

from headstart import LLM, SamplingParams

llm = LLM(draft="lookup")
print(llm.generate("Quantum entanglement is", SamplingParams(max_tokens=50, temperature=0)).text)
"""

from .api import LLM
from .drafters.base import Drafter
from .errors import (
    EngineBusy,
    GenerationFailed,
    HeadstartError,
    InvalidParameter,
    MissingExtra,
    ModelNotFound,
    ModelRefused,
    PromptTooLong,
)
from .tensors import SpeculativeOutput, speculative_decode
from .types import Choice, Completion, DraftView, Piece, Proposal, Round, SamplingParams, Stats, TokenLogprob, Verdict

__all__ = [
    "LLM",
    "Choice",
    "Completion",
    "DraftView",
    "Drafter",
    "EngineBusy",
    "GenerationFailed",
    "HeadstartError",
    "InvalidParameter",
    "MissingExtra",
    "ModelNotFound",
    "ModelRefused",
    "Piece",
    "PromptTooLong",
    "Proposal",
    "Round",
    "SamplingParams",
    "SpeculativeOutput",
    "Stats",
    "TokenLogprob",
    "Verdict",
    "speculative_decode",
]

__version__ = "0.1.0"
