"""Modules as people have them, for tests of `bring`.

Those shaped like Lightning's are made over any base class: `nn.Module`, or the real `LightningModule`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_NAMES = """
all_gather backward clip_gradients configure_callbacks configure_gradient_clipping configure_model
configure_optimizers configure_sharded_model forward log log_dict lr_scheduler_step lr_schedulers
manual_backward on_after_backward on_after_batch_transfer on_before_backward on_before_batch_transfer
on_before_optimizer_step on_before_zero_grad on_fit_end on_fit_start on_load_checkpoint
on_predict_batch_end on_predict_batch_start on_predict_end on_predict_epoch_end on_predict_epoch_start
on_predict_model_eval on_predict_start on_save_checkpoint on_test_batch_end on_test_batch_start
on_test_end on_test_epoch_end on_test_epoch_start on_test_model_eval on_test_model_train on_test_start
on_train_batch_end on_train_batch_start on_train_end on_train_epoch_end on_train_epoch_start
on_train_start on_validation_batch_end on_validation_batch_start on_validation_end on_validation_epoch_end
on_validation_epoch_start on_validation_model_eval on_validation_model_train on_validation_model_zero_grad
on_validation_start optimizer_step optimizer_zero_grad optimizers predict_dataloader predict_step
prepare_data print setup teardown test_dataloader test_step toggle_optimizer toggled_optimizer
train_dataloader training_step transfer_batch_to_device untoggle_optimizer val_dataloader validation_step
"""
HOOKS = tuple(_NAMES.split())
"""The methods of `LightningModule` that are hooks or that a step calls, by its API reference (2.6).

https://lightning.ai/docs/pytorch/stable/common/lightning_module.html, sections "Methods" and "Hooks".
"""

NOT_OURS = frozenset({"all_gather"})
"""Of those, what is neither a hook nor emulated: for several processes."""


def classifier(base: type[nn.Module] = nn.Module) -> type[Any]:
    """A module shaped like Lightning's, over a base class; `hits` notes what was called."""

    class Classifier(base):  # type: ignore[misc, valid-type]
        def __init__(self, rate: float = 0.1) -> None:
            super().__init__()
            self.body = nn.Linear(4, 8)
            self.head = nn.Linear(8, 3)
            self.rate = rate
            self.hits: list[Any] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(torch.tanh(self.body(x)))
            return out

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.hits.append((self.current_epoch, self.global_step, batch_idx))
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=False)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            logits = self(batch[0])
            found = {"val_loss": F.cross_entropy(logits, batch[1]), "acc": accuracy(logits, batch[1])}
            self.log_dict(found, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.rate)

    return Classifier


def accuracy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """How many are right, as a fraction."""
    return (logits.argmax(1) == targets).float().mean()


def pair_of_nets(base: type[nn.Module] = nn.Module) -> type[Any]:
    """A module that optimizes two nets by hand, each in turn, as a GAN does."""

    class PairOfNets(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 3)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            for optimizer in (first, second):
                self.toggle_optimizer(optimizer)
                loss = F.cross_entropy(self.two(torch.tanh(self.one(batch[0]))), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.clip_gradients(optimizer, 1.0, "norm")
                optimizer.step()
                self.untoggle_optimizer(optimizer)
            self.log("second", loss)
            self.lr_schedulers().step()

        def configure_optimizers(self) -> Any:
            one = torch.optim.SGD(self.one.parameters(), 0.1)
            two = torch.optim.Adam(self.two.parameters(), 0.01)
            return [one, two], [torch.optim.lr_scheduler.StepLR(one, 2, 0.5)]

    return PairOfNets


class Labelled(nn.Module):
    """Computes its own loss, as the models of transformers do: named inputs, `labels`, an output object."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.net(x)
        return SimpleNamespace(
            loss=None if labels is None else F.cross_entropy(logits, labels), logits=logits
        )
