"""A real little model that writes what it is told to, so that a server can be seen to serve any answer."""

from __future__ import annotations

from typing import Any

import torch
from server_tools import Server
from transformers import LlamaConfig, LlamaForCausalLM

from headstart.testing import ARCHITECTURES, TINY_VOCABULARY

END = 2  # </s>


class Scripted(LlamaForCausalLM):
    """Wants to write the ``script`` behind any prompt, and then to end; a grammar may hold it to something else."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(LlamaConfig(**ARCHITECTURES["llama"][1] | {"max_position_embeddings": 1024} | sizes))
        self.script: list[int] = []
        self.start = 0  # the prompt's length
        self.eval()

    def forward(self, input_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        found = super().forward(input_ids=input_ids, position_ids=position_ids, **more)
        at = position_ids + 1 - self.start
        script = torch.tensor([*self.script, END])
        wanted = script[at.clamp(0, len(script) - 1)]
        found.logits = found.logits.scatter_add(-1, wanted[..., None], torch.full_like(wanted[..., None], 100).float())
        return found


class ScriptedServer(Server):
    """A server whose model writes what it is told to."""

    def __init__(self, tokenizer: Any, **settings: Any) -> None:
        self.model = Scripted(vocab_size=max(TINY_VOCABULARY, len(tokenizer)))
        options = {"tokenizer": tokenizer, "quantization": None, "max_model_len": 1024, "model": self.model}
        super().__init__(llm=options, **settings)
        self.llm.listen(begun=lambda request: setattr(self.model, "start", len(request.prompt)))

    def writes(self, text: str) -> None:
        """From now on."""
        self.model.script = self.llm.codec.encode_prediction(text)
