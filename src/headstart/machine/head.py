"""The network of a draft head: one decoder layer on the target's hidden states, with few output words.

Knows: its shape, its arithmetic, and its folder on disk. Does not know: caches, rounds, or how it is trained.

Slot j of a text stands for the pair (features of token j-1, token j) and predicts token j+1; slot 0 has no features
(zeros). The features are the target's hidden states behind a low, a middle and a high layer, and where the target has
not been yet, the head's own output at slot j-1 takes the place of the fused features:

    g_j = norm(fuse @ [norm(low), norm(middle), norm(high)] of token j-1)    or    g_j = y_{j-1}
    x_j = g_j + embed @ norm(the target's embedding of token j)
    y_j = norm(a decoder layer of x_0 .. x_j)
    logits over the draft vocabulary = head @ y_j;  ids says which token each row of ``head`` stands for

Norms have no weights: the matrix behind each of them can say the same. Keys and values of a slot depend on x_j alone,
so slots that are only remembered cost two small products and no attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import ModelNotFound, ModelRefused
from .files import replacing, write_whole
from .int8 import MOST_ROWS, Product, quickest

__all__ = ["MODEL_TYPE", "HeadConfig", "HeadNet", "head_folder", "load_head", "save_head"]

MODEL_TYPE = "headstart_head"
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head, and of the target it was made for."""

    target_hidden: int  # width of the target's hidden states and embeddings
    target_layers: int
    target_vocab: int  # rows of the target's output head
    watch: tuple[int, ...]  # decoder layers whose outputs are its features
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int  # words it can say
    window: int = 512  # slots a slot sees, itself included
    rope_theta: float = 10000.0
    eps: float = 1e-6

    @staticmethod
    def of(values: Mapping[str, Any]) -> HeadConfig:
        known = {f.name for f in fields(HeadConfig)}
        given = {name: value for name, value in values.items() if name in known}
        return HeadConfig(**given | {"watch": tuple(given["watch"])})

    @property
    def features(self) -> int:
        """Numbers a token's features have."""
        return len(self.watch) * self.target_hidden


class HeadNet(nn.Module):
    """The head's matrices, and what is done with them."""

    ids: Tensor

    def __init__(self, config: HeadConfig, ids: Tensor | Sequence[int]) -> None:
        """``ids``: the target's token for each word of the draft vocabulary, rising."""
        super().__init__()
        self.config = c = config
        self.register_buffer("ids", torch.as_tensor(ids, dtype=torch.int64))
        if self.ids.shape != (c.vocab,):
            raise ValueError(f"{c.vocab} words need as many ids, not {list(self.ids.shape)}")

        def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)

        self.fuse = matrix(c.width, c.features)
        self.embed = matrix(c.width, c.target_hidden)
        self.qkv = matrix((c.heads + 2 * c.kv_heads) * c.head_dim, c.width)
        self.out = matrix(c.width, c.heads * c.head_dim, 0.5)
        self.gate_up = matrix(2 * c.ffn, c.width)
        self.down = matrix(c.width, c.ffn, 0.5)
        self.head = matrix(c.vocab, c.width)
        self._quick: dict[str, Product] = {}  # matrices that have a faster product for a few rows

    def shrink(self) -> bool:
        """For drafting on a CPU: products with int8 copies of the matrices, each done the way that is fastest here.

        A guess may be a little off, since the target checks it. Products with many rows (prompts) stay as they are.
        """
        matrices = self.named_parameters() if self.fuse.device.type == "cpu" else ()
        found = {name: quickest(matrix.detach()) for name, matrix in matrices}
        self._quick = {name: quick for name, quick in found.items() if quick is not None}
        return bool(self._quick)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._quick = {}  # moved or cast: the copies no longer belong to the weights
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _product(self, x: Tensor, name: str) -> Tensor:
        """x [.., columns] times the transpose of a matrix [rows, columns]."""
        quick = self._quick.get(name)
        if quick is None or x.numel() > MOST_ROWS * x.shape[-1]:
            matrix: Tensor = getattr(self, name)
            return F.linear(x, matrix)
        return quick(x.reshape(-1, x.shape[-1])).to(x.dtype).view(*x.shape[:-1], -1)

    def fused(self, features: Tensor) -> Tensor:
        """The target's features [.., F] -> g [.., width]."""
        parts = features.view(*features.shape[:-1], len(self.config.watch), self.config.target_hidden)
        return self._norm(self._product(self._norm(parts).flatten(-2), "fuse"))

    def word(self, embedded: Tensor) -> Tensor:
        """The target's embedding of a token [.., H] -> what is added to g [.., width]."""
        return self._product(self._norm(embedded), "embed")

    def queries_keys_values(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, N, width] -> [R, N, heads or kv_heads, dim] each. ``turn`` [R or 1, N, 1, dim / 2]: of ``rotary``."""
        c = self.config
        qkv = self._product(self._norm(x), "qkv").view(*x.shape[:2], c.heads + 2 * c.kv_heads, c.head_dim)
        turned, v = torch.split(qkv, [c.heads + c.kv_heads, c.kv_heads], dim=2)
        # Neighbouring channels as a complex number: turning is one product.
        pairs = torch.view_as_complex(turned.float().reshape(*turned.shape[:3], c.head_dim // 2, 2))
        q, k = torch.split(torch.view_as_real(pairs * turn).flatten(3).to(v.dtype), [c.heads, c.kv_heads], dim=2)
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x [.., width] and what it attended to [.., heads * dim] -> y [.., width]."""
        x = x + self._product(attended, "out")
        gate, up = self._product(self._norm(x), "gate_up").chunk(2, dim=-1)
        return self._norm(x + self._product(F.silu(gate) * up, "down"))

    def logits(self, y: Tensor) -> Tensor:
        """y [.., width] -> [.., vocab], in the order of ``ids``."""
        return self._product(y, "head")

    def rotary(self, positions: int, device: torch.device | None = None) -> Tensor:
        """How far each pair of channels turns at each position: complex [positions, 1, dim / 2]."""
        half = self.config.head_dim // 2
        speed = self.config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.outer(torch.arange(positions, dtype=torch.float64), speed)[:, None]
        return torch.polar(torch.ones_like(angle), angle).to(torch.complex64).to(device or self.fuse.device)

    def _norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), eps=self.config.eps)


# -- on disk ------------------------------------------------------------------------------------------------------


def head_folder(source: object) -> Path | None:
    """The folder, if ``source`` names one that holds a head."""
    if not isinstance(source, (str, Path)):
        return None
    path = Path(source).expanduser()
    try:
        config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return path if isinstance(config, dict) and config.get("model_type") == MODEL_TYPE else None


def save_head(
    net: HeadNet, folder: Path, about: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write config.json and model.safetensors. ``about``: more for the config, such as the target's name."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to("cpu", torch.int32 if name == "ids" else dtype or tensor.dtype).contiguous()
        for name, tensor in net.state_dict().items()
    }
    with replacing(folder / _WEIGHTS) as work:
        save_file(tensors, work, metadata={"format": "pt"})
    config = {"model_type": MODEL_TYPE, **(about or {}), **asdict(net.config)}
    write_whole(folder / _CONFIG, json.dumps(config, indent=1) + "\n")


def load_head(folder: Path) -> HeadNet:
    """Read a head, in float32."""
    try:
        config = HeadConfig.of(json.loads((folder / _CONFIG).read_text(encoding="utf-8")))
        tensors = load_file(folder / _WEIGHTS)
        net = HeadNet(config, tensors["ids"])
        net.load_state_dict({name: t if name == "ids" else t.float() for name, t in tensors.items()})
    except OSError as error:
        raise ModelNotFound(f"{folder} holds no draft head ({error})") from error
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        text = " ".join(str(error).split())[:300]
        raise ModelRefused(f"the draft head in {folder} cannot be read ({type(error).__name__}: {text})") from error
    return net.eval().requires_grad_(False)
