"""A small GPT: token and position embeddings, blocks of attention and MLP, tied output.

Shapes: B samples, T positions, C width, H heads, V vocabulary.
Sources: Radford et al., "Language models are unsupervised multitask learners", 2019; Karpathy's nanochat for the taste
(RMS norm without weights, no biases, squared ReLU).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Attention to earlier positions, then an MLP, both added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """One block; the shape stays (B, T, C)."""
        x_BTC = x_BTC + self._attend(norm(x_BTC))
        return x_BTC + self.down(F.relu(self.up(norm(x_BTC))).square())

    def _attend(self, x_BTC: torch.Tensor) -> torch.Tensor:
        B, T, C = x_BTC.shape
        qkv_BHTD = [part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(x_BTC).split(C, dim=2)]
        y_BHTD = F.scaled_dot_product_attention(*qkv_BHTD, is_causal=True)
        return self.attended(y_BHTD.transpose(1, 2).reshape(B, T, C))


class Gpt(nn.Module):
    """Predicts each next token."""

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self._init_weights(layers)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits (B, T, V) for the token after each position."""
        x_BTC = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTC = block(x_BTC)
        return F.linear(norm(x_BTC), self.token.weight)

    def _init_weights(self, layers: int) -> None:
        """Scaled so that the stream does not grow with depth, and all tokens start equally likely."""
        for name, parameter in self.named_parameters():
            deep = name.endswith(("attended.weight", "down.weight"))
            nn.init.normal_(parameter, std=0.04 / (math.sqrt(2 * layers) if deep else 1))


def norm(x_BTC: torch.Tensor) -> torch.Tensor:
    """This will scale each position's vector to unit mean square."""
    return F.rms_norm(x_BTC, (x_BTC.shape[-1],))


@torch.no_grad()
def generate(model: Gpt, start: list[int], count: int, seed: int, temperature: float = 0.7) -> list[int]:
    """This will continue `start` by `count` tokens, drawn by a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    device = model.token.weight.device
    tokens = list(start)
    for _ in range(count):
        window_1T = torch.tensor([tokens[-model.context :]], device=device)
        odds_V = torch.softmax(model(window_1T)[0, -1].float().cpu() / temperature, dim=-1)
        tokens.append(int(torch.multinomial(odds_V, 1, generator=generator)))
    return tokens[len(start) :]
