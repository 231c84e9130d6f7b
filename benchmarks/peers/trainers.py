"""The probe's job where the library owns the loop and the user hands over hooks: Lightning, transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .library import LOOP, ORDERS, Library, own_step
from .probe import Probe


class Lightning(Library):
    """A trainer with everything off that writes or draws."""

    name = "Lightning"
    places = (*LOOP, "callback", "optimizer")

    def handle(self, probe: Probe) -> Any:
        """The trainer."""
        from lightning.pytorch import Callback, Trainer

        class Strike(Callback):
            def on_train_batch_end(self, *_: Any) -> None:
                probe.strike("callback")

        return Trainer(
            max_epochs=1,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[Strike()],
        )

    def run(self, handle: Any, probe: Probe) -> None:
        """Train and validate."""
        handle.fit(_lightning_module()(probe), probe.data(), probe.data("validation"))


@functools.cache
def _lightning_module() -> Any:
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        """The job as a LightningModule; steps are written by hand where their order is the mistake."""

        def __init__(self, probe: Probe) -> None:
            super().__init__()
            self.probe = probe
            self.model = probe.build()
            self.automatic_optimization = probe.mistake not in ORDERS
            if probe.mistake == "early":
                self.built = probe.optimizer(self.model)

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.probe.keep(self.model)
            if self.automatic_optimization:
                return self.probe.loss(self.model, batch)
            optimizer = self.optimizers()
            zero, update = optimizer.zero_grad, optimizer.step
            return own_step(self.probe, self.model, batch, zero, self.manual_backward, update)

        def validation_step(self, batch: Any, number: int) -> torch.Tensor:
            return self.probe.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return self.built if self.probe.mistake == "early" else self.probe.optimizer(self.model)

    return Module


class Transformers(Library):
    """A `transformers.Trainer` with everything off that writes or draws; it is given the model."""

    name = "transformers' Trainer"
    places = (*LOOP, "callback", "optimizer")
    writes_steps = False  # its loop zeroes and updates

    def handle(self, probe: Probe) -> Any:
        """The trainer."""
        from transformers import PrinterCallback, TrainerCallback, TrainingArguments

        class Strike(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                probe.strike("callback")

        model = probe.build()
        probe.keep(model)
        built = probe.optimizer(model) if probe.mistake == "early" else None
        trainer = _probed_trainer()(
            probe,
            model=model,
            args=TrainingArguments(**BARE, eval_strategy="epoch", prediction_loss_only=True),
            train_dataset=probe.data(),
            eval_dataset=probe.data("validation"),
            optimizers=(built, None),
            callbacks=[Strike()],
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def run(self, handle: Any, probe: Probe) -> None:
        """Train and validate."""
        handle.train()


BARE: dict[str, Any] = {
    "output_dir": "trained",
    "num_train_epochs": 1,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_strategy": "no",
    "logging_nan_inf_filter": False,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}
"""Arguments with which the trainer does what the hand-written loop does, and nothing else."""


@functools.cache
def _probed_trainer() -> Any:
    from transformers import Trainer

    class Probed(Trainer):
        """Data, loss and optimizer are the probe's: the methods that one overrides for that."""

        def __init__(self, probe: Probe, **settings: Any) -> None:
            self.probe = probe
            super().__init__(**settings)

        def get_train_dataloader(self) -> Any:
            return self.train_dataset

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return self.eval_dataset

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            return self.probe.loss(model, inputs)

        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                return self.probe.loss(model, inputs), None, None

        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = self.probe.optimizer(self.model)
            return self.optimizer

    return Probed
