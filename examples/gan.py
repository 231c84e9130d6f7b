"""Two optimizers in one step that is written by hand: a generator learns to place points on a ring.

python examples/gan.py
interlock fit examples/gan.py:task
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

import interlock as il

NOISE = 4


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )


def build() -> Gan:
    torch.manual_seed(0)
    return Gan()


def optimizers(gan):
    return {
        "critic": torch.optim.Adam(gan.critic.parameters(), 2e-3, betas=(0.5, 0.9)),
        "generator": torch.optim.Adam(gan.generator.parameters(), 1e-3, betas=(0.5, 0.9)),
    }


def step(step, real):
    """One turn each. Every call is checked: an update without gradients, say, is refused."""
    gan = step.model
    critic, generator = step["critic"], step["generator"]
    fake = gan.generator(torch.randn(len(real), NOISE, device=real.device))

    critic.zero()
    judged = F.softplus(-gan.critic(real)).mean() + F.softplus(gan.critic(fake.detach())).mean()
    critic.backward(judged)
    critic.update()

    generator.zero()
    loss = F.softplus(-gan.critic(fake)).mean()
    generator.backward(loss)
    generator.update()
    return {"loss": loss, "critic_loss": judged}


def ring(count: int) -> list[torch.Tensor]:
    """Points at a distance of about 1 from the middle."""
    made = torch.Generator().manual_seed(1)
    angles = torch.rand(count, 128, generator=made) * 2 * math.pi
    radii = 1 + 0.05 * torch.randn(count, 128, generator=made)
    return list(torch.stack((radii * angles.cos(), radii * angles.sin()), -1))


def distances(gan, batch):
    """How far from the middle the generated points are."""
    radii = gan.generator(torch.randn(len(batch), NOISE, device=batch.device)).norm(dim=1)
    return {"radius": radii.mean(), "spread": radii.std()}


def data() -> il.Data:
    return il.Data(ring(100), ring(4))


task = il.Task(
    model=build, optimizer=optimizers, step=step, metrics=distances, data=data, epochs=10, name="gan"
)


def main() -> None:
    outcome = il.Engine("auto").fit(task)
    radius, spread = outcome.metrics["val_radius"], outcome.metrics["val_spread"]
    print(f"the generator's points are {radius:.2f} from the middle, give or take {spread:.2f}")
    assert 0.8 < radius < 1.2


if __name__ == "__main__":
    main()
