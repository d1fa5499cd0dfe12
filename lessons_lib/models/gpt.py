"""A GPT for one device. It knows nothing of ranks.

Every parallel method in this library trains this model, unchanged. Two habits make that possible:

* Whatever holds weights, or would do something else with a part than with the whole, is a module with a name
  (``blocks.3.attention.qkv``, ``norm``, ``cross_entropy``, ...), so that a plan can replace it.
* No module remembers a size that a rank might own only a part of. Attention counts its heads in the
  tensor it is handed, so a rank that was given a quarter of the columns of ``qkv`` simply has a quarter
  of the heads. Tokens and targets are few bytes, and every rank is given all of them.

A module that adds to the residual stream says in ``branch`` which linear layers the data passes, in order;
between two of them every column, or every head, is worked on alone. All else takes and leaves the stream.

The weights are a function of the configuration, the seed and their own name, and of nothing else: every
rank can build the same model, or only a part of it, and whoever drew random numbers before does not matter.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from lessons_lib.errors import RefusedError
from lessons_lib.models.dropout import Dropout

IGNORED = -100  # a target that is none: its position has no loss


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The sizes of a GPT.

    >>> config = GPTConfig(H=4)
    >>> config.D, config.F, config.K, config.G
    (128, 512, 32, 4)
    """

    L: int = 8  # layers: transformer blocks
    H: int = 8  # attention heads
    D: int = 128  # model: width of the residual stream
    S: int = 64  # longest sequence, in tokens
    V: int = 256  # vocabulary: one token per byte
    dropout: float = 0.0  # share of the residual stream's increments set to zero in training
    n_kv_heads: int | None = None  # heads of keys and values; None: each query head has its own
    tied: bool = False  # whether the head's weight is the embedding's

    @property
    def F(self) -> int:
        """Width of the MLP's hidden layer."""
        return 4 * self.D

    @property
    def K(self) -> int:
        """Width of one attention head."""
        return self.D // self.H

    @property
    def G(self) -> int:
        """Groups of query heads; those of a group share one head of keys and values."""
        return self.H if self.n_kv_heads is None else self.n_kv_heads

    def __post_init__(self) -> None:
        for name in ("L", "H", "D", "S", "V"):
            if getattr(self, name) < 1:
                raise RefusedError(f"GPTConfig({name}={getattr(self, name)}): {name} is at least 1")
        if self.D % self.H:
            legal = [H for H in range(1, self.D + 1) if self.D % H == 0]
            raise RefusedError(
                f"the model width D={self.D} cannot be shared out to H={self.H} heads; "
                f"try H={', '.join(map(str, legal))}"
            )
        if self.G < 1 or self.H % self.G:
            legal = [G for G in range(1, self.H + 1) if self.H % G == 0]
            raise RefusedError(
                f"H={self.H} query heads cannot share n_kv_heads={self.G} evenly; "
                f"try n_kv_heads={', '.join(map(str, legal))}"
            )


class GPT(nn.Module):
    """Predict the next byte from the bytes before it.

    >>> from lessons_lib.models.corpus import batch
    >>> model = GPT(GPTConfig(L=2), seed=1)
    >>> tokens, targets = batch(step=0, n_sequences=16, S=64)
    >>> model(tokens).shape                                  # B S V
    torch.Size([16, 64, 256])
    >>> round(model.loss(tokens, targets).item(), 1)         # log(256) is 5.5: it knows nothing yet
    5.6

    Pre-LN transformer blocks, a learned position embedding, and a head that shares its weight with the
    embedding where ``config.tied`` says so. Source: Radford et al. 2019, section 2.3; two deviations: by
    default the head is a matrix of its own, and dropout, where asked for, acts on what a block adds to the
    residual stream and on nothing else.
    """

    def __init__(self, config: GPTConfig | None = None, seed: int = 0) -> None:
        super().__init__()
        config = config or GPTConfig()
        device = torch.get_default_device()
        with torch.device("meta"):  # shapes only: `initialize` is the one place that draws numbers
            self.embedding = nn.Embedding(config.V, config.D)
            self.position = nn.Embedding(config.S, config.D)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.L))
            self.norm = nn.LayerNorm(config.D)
            self.head = nn.Linear(config.D, config.V, bias=False)
            self.cross_entropy = CrossEntropy(config)
        self.config = config
        self.to_empty(device=device)
        if config.tied:
            self.head.weight = self.embedding.weight
        initialize(self, config, seed)

    def forward(self, tokens: Int[Tensor, "B S"]) -> Float[Tensor, "b s v"]:
        """Return the logits of the token that follows each position, or a rank's part of them."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def embed(self, tokens: Int[Tensor, "B S"]) -> Float[Tensor, "b s d"]:
        """Return the residual stream before the first block, or a rank's part of it."""
        S = tokens.shape[-1]
        if S > self.config.S:
            raise RefusedError(
                f"a sequence of {S} tokens was given to a model with S={self.config.S} learned positions; "
                f"cut it, or build GPTConfig(S={S})"
            )
        return self.embedding(tokens) + self.position(torch.arange(S, device=tokens.device))

    def loss(self, tokens: Int[Tensor, "B S"], targets: Int[Tensor, "B S"]) -> Float[Tensor, ""]:
        """Return the cross entropy of ``targets``, in nats, as the mean over all targets there are."""
        return self.loss_sum(tokens, targets) / int((targets != IGNORED).sum())

    def loss_sum(self, tokens: Int[Tensor, "B S"], targets: Int[Tensor, "B S"]) -> Float[Tensor, ""]:
        """Return the cross entropies of all targets added up, for who divides by more than these.

        A target of -100 (``IGNORED``) is none.
        """
        return self.cross_entropy(self(tokens), targets)

    @torch.no_grad()
    def generate(self, prompt: bytes, n: int, temperature: float = 1.0, seed: int = 0) -> bytes:
        """Continue ``prompt`` by ``n`` bytes, each drawn from the model's prediction.

        The numbers come from a generator of its own: ranks that hold the same logits draw the same bytes.
        ``temperature`` below 1 prefers likely bytes; 0 always takes the likeliest.

        >>> model = GPT(GPTConfig(L=1))
        >>> model.generate(b"def ", 5) == model.generate(b"def ", 5) != model.generate(b"def ", 5, seed=1)
        True
        """
        if not prompt or max(prompt) >= self.config.V:
            raise RefusedError(
                f"the prompt {prompt!r} cannot be continued: it takes at least one byte, "
                f"each below the vocabulary size V={self.config.V}"
            )
        device = self.head.weight.device
        generator = torch.Generator(device).manual_seed(seed)
        was_training = self.training
        self.eval()
        tokens = torch.tensor([list(prompt)], device=device)
        for _ in range(n):
            logits = self(tokens[:, -self.config.S :])[0, -1, :256]  # vocabularies get padded; bytes do not
            if temperature == 0:
                token = logits.argmax()[None]
            else:
                token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            tokens = torch.cat([tokens, token[None]], dim=1)
        self.train(was_training)
        return bytes(tokens[0, len(prompt) :].tolist())


class Block(nn.Module):
    """One layer: attention mixes positions, the MLP works on each position alone; both add to the stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.D)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.D)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Attention(nn.Module):
    """Causal self-attention whose heads are wherever their columns are.

    The output of ``qkv`` is group-major: ``[group][H/G queries, a key, a value][K]``, and with as many groups
    as heads head-major, ``[head][q|k|v][K]``. A contiguous piece of its columns that starts at a multiple of
    (H/G + 2) K therefore holds whole heads, each with its query, key and value. In the order
    ``[q|k|v][head][K]`` the first of two ranks would own every query, half of the keys and no value.

    >>> attention = Attention(GPTConfig(H=4, D=8))
    >>> attention.qkv, attention.K
    (Linear(in_features=8, out_features=24, bias=True), 2)
    >>> Attention(GPTConfig(H=4, n_kv_heads=2, D=8)).qkv        # 4 heads of q, 2 of k, 2 of v
    Linear(in_features=8, out_features=16, bias=True)

    Source: Vaswani et al. 2017, section 3.2; Ainslie et al. 2023 (GQA), section 2.2.
    """

    branch: ClassVar = ("qkv", "proj")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.K, self.n_sharing = config.K, config.H // config.G  # sizes of one group, which no rank divides
        self.qkv = nn.Linear(config.D, (config.H + 2 * config.G) * config.K)
        self.proj = nn.Linear(config.D, config.D)

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        groups = self.qkv(x).unflatten(-1, (-1, self.n_sharing + 2, self.K))  # B S G (H/G + 2) K
        q, k, v = groups.split((self.n_sharing, 1, 1), dim=-2)
        q, k, v = (heads.flatten(2, 3).transpose(1, 2) for heads in (q, k, v))  # B H S K, B G S K twice
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(-2))

    def attend(
        self, q: Float[Tensor, "B h S K"], k: Float[Tensor, "B g S K"], v: Float[Tensor, "B g S K"]
    ) -> Float[Tensor, "B h S K"]:
        """Let every position look at itself and those before it. No parameter takes part.

        Query heads h/g by h/g, in order, look at one head of keys and values.
        """
        shared = q.shape[1] != k.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)


class MLP(nn.Module):
    """Widen from D to F, bend, and narrow back."""

    branch: ClassVar = ("up", "down")

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.D, config.F)
        self.down = nn.Linear(config.F, config.D)

    def forward(self, x: Float[Tensor, "B S D"]) -> Float[Tensor, "B S D"]:
        return self.down(functional.gelu(self.up(x)))


class CrossEntropy(nn.Module):
    """The losses of all targets, added up."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.V = config.V

    def forward(self, logits: Float[Tensor, "B S V"], targets: Int[Tensor, "B S"]) -> Float[Tensor, ""]:
        return functional.cross_entropy(
            logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED
        )


@torch.no_grad()
def initialize(model: nn.Module, config: GPTConfig, seed: int) -> None:
    """Fill the parameters of ``model``, each from a generator of its own, named by ``seed`` and its name.

    Matrices are normal with standard deviation 0.02; the two that end a branch of a block are smaller by
    the square root of the 2 L branches that add up in the residual stream. Biases are 0, norms 1. Numbers
    are drawn in float64 and then rounded, so a model has the same weights in every dtype.
    Source: Radford et al. 2019, section 2.3.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:  # a shape, which no number can fill
            continue
        if parameter.ndim == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        ends_a_branch = name.endswith(("attention.proj.weight", "mlp.down.weight"))
        std = 0.02 / math.sqrt(2 * config.L) if ends_a_branch else 0.02
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        shape, dtype = parameter.shape, torch.float64
        parameter.copy_(std * torch.randn(shape, generator=generator, dtype=dtype, device="cpu"))
