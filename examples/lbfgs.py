"""An optimizer that evaluates the loss several times for one update: LBFGS, in a step written by hand.

python examples/lbfgs.py
interlock fit examples/lbfgs.py:task
"""

import torch
import torch.nn.functional as F
from torch import nn

import interlock as il

SLOPES, OFFSET = torch.tensor([2.0, -1.0, 0.5]), 3.0


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def step(step, batch):
    """`minimize` hands the closure over, and checks it: the loss is computed as often as LBFGS likes."""
    inputs, targets = batch
    return step.minimize(lambda: F.mse_loss(step.model(inputs).squeeze(1), targets))


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One batch with all there is: LBFGS wants the same function each time."""
    made = torch.Generator().manual_seed(1)
    inputs = torch.randn(200, 3, generator=made)
    return [(inputs, inputs @ SLOPES + OFFSET + 0.01 * torch.randn(200, generator=made))]


task = il.Task(
    model=build,
    optimizer=lambda m: torch.optim.LBFGS(m.parameters(), line_search_fn="strong_wolfe"),
    step=step,
    data=data,
    epochs=5,
    name="lbfgs",
)


def main() -> None:
    fitted = il.Engine("auto").fit(task).model
    slopes = [round(value, 1) for value in fitted.weight.flatten().tolist()]
    print(f"fitted: slopes {slopes}, offset {fitted.bias.item():.1f}")


if __name__ == "__main__":
    main()
