"""A module that was written for Lightning, trained as it is. Lightning need not be installed.

    python examples/bring.py
    interlock fit examples/bring.py:task

Derive it from `lightning.LightningModule` or from `nn.Module`: it is the methods that count. What becomes of
each of them is printed first.
"""

import torch
import torch.nn.functional as F
from torch import nn

import interlock as il


class Circle(nn.Module):
    """Tells points inside of a circle from those outside."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, points):
        return self.net(points)

    def training_step(self, batch, batch_idx):
        points, inside = batch
        loss = F.cross_entropy(self(points), inside)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        points, inside = batch
        scores = self(points)
        self.log("val_loss", F.cross_entropy(scores, inside))
        self.log("val_acc", (scores.argmax(1) == inside).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self):
        return batches(100)

    def val_dataloader(self):
        return batches(10)

    def on_train_end(self):
        self.finished = True


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    points = [torch.rand(64, 2) * 2 - 1 for _ in range(count)]
    return [(p, (p.square().sum(1) < 0.6).long()) for p in points]


# The engine has no place for on_train_end: without the waiver this is an error that says so.
task = il.bring(Circle(), waive=["on_train_end"], epochs=3)


if __name__ == "__main__":
    outcome = il.Engine("auto").fit(task)
    print(f"accuracy {outcome.metrics['val_acc']:.3f}, validation loss {outcome.metrics['val_loss']:.3f}")
    print(f"outcome: {outcome.status}, {outcome.steps} steps; on the device afterwards: {outcome.residue}")
