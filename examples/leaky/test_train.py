"""Tests of the script beside it: two pass, three fail with the name of what they leave on the device.

    pytest examples/leaky --interlock-leaks

The device is the simulated one, so no GPU is needed. Each leak is mended in one line; which, stands below.
"""

from __future__ import annotations

import pytest
import train

STREAMS = []


@pytest.fixture
def device(sim_device):  # noqa: ARG001 - it installs the device
    return "sim"


def test_training_leaves_nothing(device):
    assert len(train.train(device)) == 4


def test_logging_leaves_losses_in_a_closure(device):
    train.train(device, log=train.log)  # mend: `losses.append(loss.item())`


def test_normalizing_leaves_means_in_a_cache(device):
    assert len(list(train.normalized(device))) == 2  # mend: `MEANS[step] = points.mean(0).to("cpu")`


def test_a_peek_leaves_the_batch_in_a_live_generator(device):
    first, stream = train.peek(device)
    STREAMS.append(stream)  # mend: `stream.close()`
    assert first != 0


def test_a_peek_that_closes_its_stream_leaves_nothing(device):
    _, stream = train.peek(device)
    stream.close()
