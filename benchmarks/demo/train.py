"""Trains the demo model from scratch: a small Llama that answers questions from its document.

    python benchmarks/demo/train.py --out DIR [--seed N] [--threads N] [--resume]

The model learns one skill, to look up a fact in the text before it, and the data teach only that.
Each training sequence is a conversation as in the demo: a handbook as the system turn, then turns
of question and answer until the sequence is full. Every handbook is new. The curriculum begins with
handbooks of a few sentences and ends with those of the demo's length.

From the answers alone, a model this small needs many hours on a CPU to learn where to look. So five
of its heads are trained to look at the right positions (`guide.py`), which takes minutes; the loss
on the answers does the rest. The result is an ordinary Llama.

Matrices are trained by Muon, embeddings and norms by AdamW. The learning rate is constant up to the
last stage, in which it decays to zero.

The shipped model was made by `--seed 0 --threads 1`: 969 steps, 5.7 million tokens, 37 minutes on
one busy core of a 2-core machine. In `demo_accuracy.py` it answers exactly 200 of 200 fresh
questions in a conversation's first turn and 198 of 200 in its third. Another number of threads adds
floats in another order and so gives another model.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

# Python puts a script's own folder on the import path; this one needs the folder above.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo.guide import Conversation, Guide, draw_conversation, guidance_loss
from demo.llama import Model, export
from demo.tokenizer import ASSISTANT, END, PAD, train_tokenizer
from demo_accuracy import measure

MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.01
ADAM_LR, ADAM_BETAS = 0.003, (0.9, 0.98)
WARM_UP_STEPS = 50
OTHER_WEIGHT, OTHER_SHARE = 0.1, 0.1  # loss weight of the tokens outside answers; share sampled
GUIDE_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the curriculum, which ends at the share `until` or after `steps` steps.

    Attributes:
        facts: fewest and most facts of a handbook.
        length: tokens in a sequence.
        batch: sequences in a step.
        steps: most steps of the stage.
        until: share of exact answers (moving average) that ends the stage; above 1: never.
        rate: factor of the learning rates.
        decay: whether the learning rates decay linearly to zero over the stage.
    """

    facts: tuple[int, int]
    length: int
    batch: int
    steps: int
    until: float
    rate: float
    decay: bool = False


CURRICULUM = (
    Stage(facts=(2, 8), length=224, batch=28, steps=600, until=0.92, rate=1.0),
    Stage(facts=(8, 24), length=448, batch=13, steps=350, until=0.94, rate=0.8),
    Stage(facts=(20, 50), length=832, batch=7, steps=200, until=0.95, rate=0.6),
    Stage(facts=(20, 90), length=1408, batch=4, steps=450, until=2.0, rate=0.6, decay=True),
)


class Muon:
    """Momentum whose updates five Newton-Schulz steps make nearly orthogonal.

    torch.optim.Muon does the same in bfloat16, which a CPU without bfloat16 units emulates. This
    one computes in float32, on all matrices of one shape at once.
    """

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        self.groups = [(ps, torch.zeros(len(ps), *shape)) for shape, ps in by_shape.items()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Takes one step along the gradients in `grad`."""
        for matrices, momentum in self.groups:
            gradient = torch.stack([p.grad for p in matrices if p.grad is not None])
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            update = gradient.lerp(momentum, MUON_MOMENTUM)
            tall = update.shape[1] > update.shape[2]
            x = update.mT if tall else update
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                a = x @ x.mT
                x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
            x = x.mT if tall else x
            gain = max(1.0, x.shape[1] / x.shape[2]) ** 0.5
            for p, direction in zip(matrices, x, strict=True):
                p.mul_(1 - lr * MUON_DECAY).add_(direction, alpha=-lr * gain)


def draw_batch(
    tokenizer: Tokenizer, stage: Stage, rng: random.Random
) -> tuple[Tensor, Tensor, Guide]:
    """A step's conversations: ids [batch, length + 1], which of them are answers, the guide."""
    assistant, end = tokenizer.token_to_id(ASSISTANT), tokenizer.token_to_id(END)
    talks: list[Conversation] = [
        draw_conversation(rng, rng.randint(*stage.facts), stage.length) for _ in range(stage.batch)
    ]
    encodings = tokenizer.encode_batch([talk.text for talk in talks], add_special_tokens=False)
    rows, answers = [], []
    for encoding in encodings:
        ids = encoding.ids[: stage.length + 1]
        ids += [tokenizer.token_to_id(PAD)] * (stage.length + 1 - len(ids))
        inside, marks = False, []
        for token in ids:
            marks.append(inside)
            inside = token == assistant or (inside and token != end)
        rows.append(ids)
        answers.append(marks)
    guide = Guide.of(talks, [encoding.offsets for encoding in encodings], stage.length)
    return torch.tensor(rows), torch.tensor(answers), guide


def exact_share(right: Tensor, answers: Tensor, starts: Tensor) -> float:
    """The share of answers without a wrong token, if each is predicted after the right ones.

    Args:
        right: bool [A], whether each token of an answer is predicted right.
        answers: bool [B, T], true at these A tokens.
        starts: bool [B, T], true where an answer begins.
    """
    number = starts.flatten().cumsum(0)[answers.flatten()]
    return 1 - number[~right].unique().numel() / max(1, number.unique().numel())


class Training:
    """The state of a training run; a checkpoint stores all of it."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out = out
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.tokenizer = train_tokenizer(seed)
        self.model = Model()
        self.compiled = torch.compile(self.model, dynamic=False)
        self.muon = Muon(self.model.matrices())
        self.adam = torch.optim.AdamW(
            self.model.others(), lr=ADAM_LR, betas=ADAM_BETAS, weight_decay=0.0
        )
        self.stage = self.stage_step = self.step = self.tokens = 0
        self.exact = 0.0
        self.seconds = 0.0

    def save(self) -> None:
        """Writes all that `load` needs to continue as if the run had not stopped."""
        progress = ("stage", "stage_step", "step", "tokens", "exact", "seconds")
        state = {
            "model": self.model.state_dict(),
            "muon": [momentum for _, momentum in self.muon.groups],
            "adam": self.adam.state_dict(),
            "progress": {name: getattr(self, name) for name in progress},
            "random": (self.rng.getstate(), torch.get_rng_state()),
        }
        torch.save(state, self.out / "checkpoint.tmp")
        (self.out / "checkpoint.tmp").replace(self.out / "checkpoint.pt")

    def load(self) -> None:
        """Continues from the last checkpoint in the output folder."""
        state = torch.load(self.out / "checkpoint.pt", weights_only=False)
        self.model.load_state_dict(state["model"])
        for (_, momentum), saved in zip(self.muon.groups, state["muon"], strict=True):
            momentum.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        for name, value in state["progress"].items():
            setattr(self, name, value)
        self.rng.setstate(state["random"][0])
        torch.set_rng_state(state["random"][1])

    def run(self) -> None:
        """Runs the rest of the curriculum, and saves every two minutes and after each stage."""
        saved = time.perf_counter()
        while self.stage < len(CURRICULUM):
            stage = CURRICULUM[self.stage]
            start = time.perf_counter()
            loss, found, exact = self._take_step(stage)
            self.seconds += time.perf_counter() - start
            self.tokens += stage.batch * stage.length
            self.step += 1
            self.stage_step += 1
            # The mean of the first 40 steps, then a moving average over about 40.
            self.exact += (exact - self.exact) / min(self.stage_step, 40)
            if self.step % 10 == 0:
                print(
                    f"{self.seconds:6.0f} s, stage {self.stage}, step {self.step}, "
                    f"{self.tokens / 1e6:.2f}M tokens, loss {loss:.3f}, facts found {found:.3f}, "
                    f"exact {self.exact:.3f}",
                    flush=True,
                )
            learned = self.stage_step >= 40 and self.exact >= stage.until
            if learned or self.stage_step == stage.steps:
                self.stage += 1
                self.stage_step, self.exact = 0, 0.0
            if time.perf_counter() - saved > 120 or self.stage_step == 0:
                self.save()
                saved = time.perf_counter()

    def _take_step(self, stage: Stage) -> tuple[float, float, float]:
        ids, answers, guide = draw_batch(self.tokenizer, stage, self.rng)
        inputs, targets, answers = ids[:, :-1], ids[:, 1:], answers[:, 1:]
        others = (torch.rand(answers.shape) < OTHER_SHARE) & ~answers
        hidden, seen = self.compiled(inputs)
        # The output matrix is applied only to tokens with a loss.
        logits = F.linear(hidden[answers], self.model.embed.weight)
        other_logits = F.linear(hidden[others], self.model.embed.weight)
        loss = F.cross_entropy(logits, targets[answers])
        looking, found = guidance_loss(seen, guide)
        total = loss + OTHER_WEIGHT * F.cross_entropy(other_logits, targets[others])
        total = total + GUIDE_WEIGHT * looking
        self.model.zero_grad(set_to_none=True)
        total.backward()
        scale = stage.rate * min(1.0, (self.step + 1) / WARM_UP_STEPS)
        if stage.decay:
            scale *= 1 - self.stage_step / stage.steps
        nn.utils.clip_grad_norm_(self.model.others(), 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * scale
        self.adam.step()
        self.muon.step(MUON_LR * scale)
        right = logits.argmax(-1) == targets[answers]
        starts = inputs == self.tokenizer.token_to_id(ASSISTANT)
        return loss.item(), found, exact_share(right, answers, starts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.pt")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    training = Training(args.out, args.seed)
    if args.resume:
        training.load()
    training.run()
    export(training.model, training.tokenizer, args.out)
    for row in measure(args.out, conversations=200):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
