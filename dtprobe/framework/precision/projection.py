"""A gradient in five numbers: four random projections and its squared norm, enough to compare it with a mean over ranks.

Projections are linear, so those of a mean are the mean of those of its terms: no rank has to see another's gradient. Of a difference of
norm d the root mean square of four projections is under 0.03 d in about one case of ten million (chi-square, 4 degrees of freedom).
"""

from __future__ import annotations

import torch

COUNT = 4
CHUNK = 2**16


class Projector:
    """Projects tensors of any shape and dtype; the same elements at the same place give the same numbers on every rank."""

    def __init__(self, seed: int = 20) -> None:
        self._seed = seed
        self._weights: dict[torch.device, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """float64 [5]: the projections, and the squared norm. `offset`: where the first element lies in the whole, flattened."""
        flat = tensor.detach().reshape(-1)
        weights = self._on(flat.device)
        terms, done = [], 0
        while done < flat.numel():
            chunk, start = divmod(offset + done, CHUNK)
            piece = flat[done : done + CHUNK - start].double()
            projections = piece @ weights[start : start + piece.numel()]
            if chunk:
                # one set of weights serves all chunks; signs that differ from chunk to chunk keep equal chunks from cancelling
                signs = [1.0 - 2.0 * (chunk * 2654435761 >> (16 + bit) & 1) for bit in range(COUNT)]
                projections *= torch.tensor(signs, dtype=torch.float64, device=flat.device)
            terms.append(torch.cat([projections, piece.dot(piece)[None]]))
            done += piece.numel()
        if not terms:
            return torch.zeros(COUNT + 1, dtype=torch.float64, device=flat.device)
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    def _on(self, device: torch.device) -> torch.Tensor:
        if device not in self._weights:
            source = torch.Generator().manual_seed(self._seed)
            self._weights[device] = torch.randn(CHUNK, COUNT, generator=source, dtype=torch.float64).to(device)
        return self._weights[device]
