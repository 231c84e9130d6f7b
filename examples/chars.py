"""A small transformer learns to write like Python's own manual, character by character, on a CPU.

    python examples/chars.py
    interlock fit examples/chars.py:task

The text is what `help("...")` shows of the language reference, the module `pydoc_data.topics`: real prose,
long enough to learn from, and a part of the standard library. It differs a little between versions of Python.
"""

import math
import re
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import interlock as il

# A net this small trains fastest on one core: threads would wait for each other most of the time.
torch.set_num_threads(1)

LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 2
CHARACTERS = 400_000

TEXT = re.sub(r"[^\n -~]", "", "\n".join(topics[name] for name in sorted(topics)))[:CHARACTERS]
ALPHABET = sorted(set(TEXT))
NUMBER = {character: number for number, character in enumerate(ALPHABET)}

PIECES = (len(TEXT) - 1) // LENGTH
HELD_OUT = PIECES // 10
BATCH, EPOCHS, WARM_UP = 32, 3, 50
STEPS = EPOCHS * math.ceil((PIECES - HELD_OUT) / BATCH)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mixing = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.attended = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        heads = self.query_key_value(self.before_attention(x)).unflatten(2, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(found.transpose(1, 2).flatten(2))
        return x + self.mix(self.before_mixing(x))


class Writer(nn.Module):
    """Numbers of characters in; for each of them, a score for every character that may come next."""

    def __init__(self) -> None:
        super().__init__()
        self.character, self.place = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.scores = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET)))

    def forward(self, numbers):
        places = torch.arange(numbers.shape[1], device=numbers.device)
        return self.scores(self.layers(self.character(numbers) + self.place(places)))


def build() -> nn.Module:
    # The same start in every run, and the program's own random numbers stay as they were.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Writer()


def optimizer(writer):
    return torch.optim.AdamW(writer.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.05)


def rate(step: int) -> float:
    """Warm-up, then half a cosine down to a twentieth: what the learning rate is multiplied by."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.05 + 0.95 * (1 + math.cos(math.pi * min(1, (step - WARM_UP) / (STEPS - WARM_UP)))) / 2


def loss(writer, batch):
    (pieces,) = batch
    return F.cross_entropy(writer(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())


def right(writer, batch):
    (pieces,) = batch
    return {"right": (writer(pieces[:, :-1]).argmax(2) == pieces[:, 1:]).float().mean()}


def numbers_of(text: str) -> torch.Tensor:
    return torch.tensor([NUMBER[character] for character in text])


def data() -> il.Data:
    """Pieces of the text; the last tenth is held out."""
    pieces = numbers_of(TEXT).unfold(0, LENGTH + 1, LENGTH)
    order = torch.Generator().manual_seed(0)
    train, validate = TensorDataset(pieces[:-HELD_OUT]), TensorDataset(pieces[-HELD_OUT:])
    return il.Data(DataLoader(train, BATCH, shuffle=True, generator=order), DataLoader(validate, 128))


def entropy() -> float:
    """The loss of one who knows how often each character comes, and nothing of what came before it."""
    shares = numbers_of(TEXT).bincount() / len(TEXT)
    return -(shares * shares.log()).sum().item()


def write(writer, start, many: int = 120):
    """Adds characters to a start, drawn one after the other by the scores that they are given."""
    drawn = torch.Generator().manual_seed(1)
    for _ in range(many):
        scores = writer(start[:, -LENGTH:])[:, -1].cpu() / 0.7
        found = torch.multinomial(scores.softmax(1), 1, generator=drawn)
        start = torch.cat((start, found.to(start.device)), 1)
    return start


task = il.Task(
    name="chars",
    model=build,
    optimizer=optimizer,
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, rate),
    options=[il.ClipNorm(1.0)],
    loss=loss,
    metrics=right,
    output=write,
    data=data,
    epochs=EPOCHS,
)


def main() -> None:
    writer = il.Engine("auto", progress=True).fit(task).model
    engine = il.Engine("auto")
    found = engine.evaluate(writer, task.load().validate, loss=loss, metrics=right)
    print(f"held out: loss {found['loss']:.2f}, where frequencies alone give {entropy():.2f}")
    print(f"          {found['right']:.0%} of the characters foreseen")
    (written,) = engine.predict(writer, [numbers_of("The ")[None]], output=write)
    print("".join(ALPHABET[number] for number in written[0].tolist()))
    assert found["loss"] < 0.75 * entropy()


if __name__ == "__main__":
    main()
