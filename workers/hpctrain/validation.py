"""The loss over samples that nobody learns from.

All ranks take a part.  Does not know what the samples are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hpctrain.comm import Communicator

# The sum of losses over one part (of so many) of the validation samples, and how many samples that part has.
Validation = Callable[[int, int], tuple[float, int]]


@torch.no_grad()
def validation_loss(model: torch.nn.Module, validation: Validation, comm: Communicator) -> float:
    """This will give the mean loss over the validation samples; all ranks take a part of them."""
    training = [
        module for module in model.modules() if module.training
    ]  # frozen layers may be in eval mode all the time
    model.eval()
    total, count = validation(comm.rank, comm.size)
    for module in training:
        module.training = True
    facts = torch.tensor([total, float(count)], dtype=torch.float64)
    comm.all_reduce(facts)
    return float(facts[0] / facts[1])
