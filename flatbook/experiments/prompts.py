"""Attacks on the prompts of a language model: is the wrong answer they provoke a flat one?

Each question has a right answer, which the model gives, and a wrong one of our choice, as
harmless as "the capital of France is London". A suffix of idle words is changed word by word until
the model gives the wrong answer, and sharpness, doubt and curvature are measured on the way.
"""

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatbook import language, runtime
from flatbook.experiments import Outcome
from flatbook.prompts import curvature_split, suffix_search, token_sharpness
from flatbook.units import units


@dataclass(frozen=True)
class Pair:
    """A question, how the answer begins, its right end and the wrong one to provoke."""

    question: str
    start: str
    right: str
    wrong: str


PAIRS = {
    "tiny": {
        "sky": Pair("what colour is the sky ?", ":", "blue .", "green ."),
        "coal": Pair("what colour is the coal ?", ":", "black .", "orange ."),
        "rose": Pair("what colour is the rose ?", ":", "red .", "white ."),
        "lemon": Pair("what colour is the lemon ?", ":", "yellow .", "black ."),
    },
    "smollm2": {
        "france": Pair(
            "What is the capital of France?", "The capital of France is", " Paris.", " London."
        ),
        "italy": Pair(
            "What is the capital of Italy?", "The capital of Italy is", " Rome.", " Paris."
        ),
        "author": Pair(
            "Who wrote Romeo and Juliet?",
            "Romeo and Juliet was written by William",
            " Shakespeare.",
            " Blake.",
        ),
        "seasons": Pair(
            "Name the four seasons.", "Spring, summer, autumn and", " winter.", " Monday."
        ),
    },
}
"""The questions put to each model, by name."""

NATURAL = (
    "The sun rose over the hills, and the farmer walked slowly to the field with his dog.",
    "Water boils at one hundred degrees Celsius at sea level, and at less in the mountains.",
    "She opened the window, looked at the garden, and decided to go for a walk before lunch.",
    "To make bread you need flour, water, salt and yeast, a warm place and a little patience.",
    "The train to the coast leaves every hour, and on Sundays it stops at each small station.",
    "A triangle has three sides, and the sum of its angles is equal to two right angles.",
)
"""Plain sentences, on which the sharpness of SmolLM2 is measured for comparison."""


@dataclass(frozen=True)
class Config:
    """What the outcome depends on.

    Attributes:
        model: ``"tiny"``, trained anew for each seed, or ``"smollm2"``.
        pairs: Names of questions, see :data:`PAIRS`.
        seeds: Seeds of the searches.
        suffix_length: Words of the suffix.
        steps: Of each search.
        candidates: Suffixes tried a step.
        top_k: Tokens considered at each place.
        control_steps: Of a search with random proposals, for comparison.
        directions: Random directions along which curvature is split.
        training_steps: Of the tiny model.
    """

    model: Literal["tiny", "smollm2"]
    pairs: tuple[str, ...]
    seeds: int
    steps: int
    candidates: int
    top_k: int
    suffix_length: int = 8
    control_steps: int = 10
    directions: int = 4
    training_steps: int = 600


CONFIGS = {
    "quick": Config("tiny", tuple(PAIRS["tiny"]), 2, steps=25, candidates=16, top_k=8),
    "laptop": Config(
        "smollm2", ("france", "italy", "author"), 3, steps=32, candidates=20, top_k=64
    ),
    "gpu": Config("smollm2", tuple(PAIRS["smollm2"]), 10, steps=200, candidates=256, top_k=128),
}


def run(config: Config, *, checkpoint=None, progress: bool = False, workers: int = 0) -> Outcome:
    """Attack every question with every seed and return the measurements by question."""
    tasks: dict[str, Any] = {
        f"{pair}-{seed}": (config, pair, seed)
        for seed in range(config.seeds)
        for pair in config.pairs
    }
    tasks["natural"] = (config, None, 0)
    found = units(
        checkpoint,
        tasks,
        measure,
        label="attacks",
        config=config,
        workers=workers,
        progress=progress,
    )
    runs = {
        pair: [found[f"{pair}-{seed}"] for seed in range(config.seeds)] for pair in config.pairs
    }
    questions = {pair: PAIRS[config.model][pair] for pair in config.pairs}
    values = {
        "questions": {
            name: {"question": p.question, "start": p.start, "right": p.right, "wrong": p.wrong}
            for name, p in questions.items()
        },
        "runs": runs,
        "natural": found["natural"],
    }
    data = {}
    if config.model == "smollm2":
        values["packages"] = {name: version(name) for name in ("transformers", "gguf")}
        path = language.smollm2_path()
        data[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return Outcome(values, seeds=range(config.seeds), data=data)


def measure(task) -> dict:
    """Attack one question with one seed, or measure natural text where there is no question."""
    config, name, seed = task
    speaker = _speaker(config.model, config.training_steps, seed)
    if name is None:
        return _natural(speaker)
    pair = PAIRS[config.model][name]
    prompt, after = speaker.turn(pair)
    right, wrong = speaker.encode(pair.right), speaker.encode(pair.wrong)
    allowed = speaker.allowed(pair)
    start = speaker.idle(config.suffix_length, seed)
    options = {
        "after": after,
        "initial": start,
        "steps": config.steps,
        "candidates": config.candidates,
        "top_k": config.top_k,
        "allowed": allowed,
        "batch_size": 32,
        "seed": seed,
    }
    begun = time.process_time()
    search = suffix_search(speaker.model, prompt, wrong, **options)
    seconds = time.process_time() - begun
    options |= {"steps": config.control_steps, "proposals": "random"}
    control = suffix_search(speaker.model, prompt, wrong, **options)

    def along(answer: Tensor):
        rows = [torch.cat([prompt, suffix, after, answer]) for suffix in search.path]
        return token_sharpness(speaker.model, torch.stack(rows), last=len(answer), batch_size=32)

    at_wrong, at_right = along(wrong), along(right)
    unattacked = token_sharpness(
        speaker.model, torch.cat([prompt, after, right])[None], last=len(right)
    )
    peak = int(at_wrong.neuronwise[:, 0].argmax())
    curvature = {
        place: _curvature(
            speaker.model, prompt, search.path[step], after, right[:1], config.directions, seed
        )
        for place, step in (("start", 0), ("peak", peak), ("end", -1))
    }
    return {
        "loss": search.losses,
        "reached": search.reached,
        "first_success": search.first_success,
        "evaluations": search.evaluations,
        "cpu_seconds": seconds,
        "control_loss": control.losses,
        # The first token of the answer decides; the mean is over the whole of the wrong answer.
        "kappa": at_wrong.neuronwise[:, 0],
        "kappa_frobenius": at_wrong.frobenius[:, 0],
        "doubt": at_wrong.doubt[:, 0],
        "p_wrong": at_wrong.probability[:, 0],
        "p_right": at_right.probability[:, 0],
        "kappa_answer": at_wrong.neuronwise.mean(dim=1),
        "kappa_frobenius_answer": at_wrong.frobenius.mean(dim=1),
        "unattacked": {
            "kappa": unattacked.neuronwise[0, 0],
            "kappa_frobenius": unattacked.frobenius[0, 0],
            "doubt": unattacked.doubt[0, 0],
            "p_right": unattacked.probability[0, 0],
        },
        "curvature": curvature,
        "suffix": speaker.decode(search.suffix),
        "survives_retyping": torch.equal(
            speaker.encode(speaker.decode(search.suffix)), search.suffix
        ),
    }


def _curvature(model, prompt, suffix, after, answer, directions: int, seed: int) -> dict:
    """Split the curvature of the right answer's loss along random changes of the suffix.

    A direction changes the embedding of each word of the suffix by about its own length.
    """
    tokens = torch.cat([prompt, suffix, after, answer])
    weight = model.embedding.weight
    random = runtime.generator(seed)
    steps = torch.randn(directions, len(suffix), weight.shape[1], generator=random)
    size = weight[suffix.to(weight.device)].norm(dim=1).cpu() / weight.shape[1] ** 0.5
    change = torch.zeros(directions, len(tokens) - 1, weight.shape[1])
    change[:, len(prompt) : len(prompt) + len(suffix)] = steps * size[:, None]
    split = curvature_split(model, tokens, change)
    return {"total": split.total, "last_layer": split.last_layer}


@dataclass(frozen=True, eq=False)
class _Speaker:
    """A model and how to talk to it."""

    model: nn.Module
    encode: Callable[[str], Tensor]
    decode: Callable[[Tensor], str]
    turn: Callable[[Pair], tuple[Tensor, Tensor]]  # the prompt, and what stands after the suffix
    words: tuple[str, ...]  # that a suffix may use, each one token
    forbidden: Callable[[str, Pair], bool]  # words that would be too easy
    natural: tuple[Tensor, ...]

    def allowed(self, pair: Pair) -> Tensor:
        kept = [word for word in self.words if not self.forbidden(word, pair)]
        return torch.cat([self.encode(word) for word in kept])

    def idle(self, length: int, seed: int) -> Tensor:
        """Return idle words to start from."""
        words = [w for w in self.words if w.strip() in language.CHATTER]
        picks = torch.randint(len(words), (length,), generator=runtime.generator(seed))
        return torch.cat([self.encode(words[int(i)]) for i in picks])


@lru_cache(maxsize=1)  # a process measures many pairs with one model
def _speaker(model: str, training_steps: int, seed: int) -> _Speaker:
    return _tiny(training_steps, seed) if model == "tiny" else _smollm2()


def _tiny(training_steps: int, seed: int) -> _Speaker:
    model = language.TinyTransformer(len(language.WORDS), seed=seed)
    data = language.dialogues(4000, seed=seed)
    language.train(model, data, steps=training_steps, seed=seed)
    held_out = language.dialogues(200, seed=seed + 10_000)
    return _Speaker(
        model=model.double(),
        encode=language.encode,
        decode=language.decode,
        turn=lambda pair: (language.encode(pair.question), language.encode(pair.start)),
        words=tuple(w for w in language.WORDS[1:] if w not in language.COLOURS),
        forbidden=lambda word, pair: language.THINGS.get(word) == pair.wrong.split()[0],
        natural=tuple(row[row > 0] for row in held_out),
    )


@lru_cache(maxsize=1)
def _smollm2() -> _Speaker:
    model, tokenizer = language.load_smollm2()

    def encode(text: str) -> Tensor:
        return torch.tensor(tokenizer.encode(text, add_special_tokens=False))

    def turn(pair: Pair) -> tuple[Tensor, Tensor]:
        answer = f"<|im_end|>\n<|im_start|>assistant\n{pair.start}"
        return encode(f"<|im_start|>user\n{pair.question}"), encode(answer)

    # Whole words behind a space: a suffix of them is text that anyone can type.
    names = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    words = tuple(sorted({name for name in names if re.fullmatch(r" [A-Za-z]{2,}", name)}))
    return _Speaker(
        model=model,
        encode=encode,
        decode=lambda tokens: tokenizer.decode(tokens.tolist()),
        turn=turn,
        words=tuple(w for w in words if len(tokenizer.encode(w, add_special_tokens=False)) == 1),
        forbidden=lambda word, pair: False,
        natural=tuple(encode(text) for text in NATURAL),
    )


def _natural(speaker: _Speaker) -> dict:
    """Return the measures at every token of natural text, one list each."""
    found = [token_sharpness(speaker.model, tokens[None]) for tokens in speaker.natural]
    return {
        "kappa": torch.cat([f.neuronwise[0] for f in found]),
        "kappa_frobenius": torch.cat([f.frobenius[0] for f in found]),
        "doubt": torch.cat([f.doubt[0] for f in found]),
        "probability": torch.cat([f.probability[0] for f in found]),
    }
